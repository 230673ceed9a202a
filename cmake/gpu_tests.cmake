# tests/gpu: one program, which carries the hash of the sources that its results stand for. It may run on another machine than
# the one that builds it, from the root of a source tree.
if(NOT NARROWS_SANITIZE)
  file(GLOB narrows_gpu_test_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/gpu/*.cpp")
  set(narrows_gpu_hash "${PROJECT_BINARY_DIR}/gpu_source_hash.cpp")
  add_custom_target(narrows_gpu_hash
    COMMAND ${narrows_python} "${PROJECT_SOURCE_DIR}/tests/gpu/source_hash.py" "${PROJECT_SOURCE_DIR}"
      --write "${narrows_gpu_hash}"
    BYPRODUCTS "${narrows_gpu_hash}" COMMENT "Hashing the sources of the GPU tests" VERBATIM)
  add_executable(narrows_gpu_tests ${narrows_gpu_test_sources} "${narrows_gpu_hash}"
    "${PROJECT_SOURCE_DIR}/tests/support/cases.cpp" "${PROJECT_SOURCE_DIR}/tests/support/counting.cpp"
    "${PROJECT_SOURCE_DIR}/tests/support/counting_backward.cpp")
  add_dependencies(narrows_gpu_tests narrows_gpu_hash)
  narrows_test_program(narrows_gpu_tests support/precompiled.hpp)
  # Random cache calls choose among the CPU's instruction sets too.
  target_link_libraries(narrows_gpu_tests PRIVATE narrows_wide_kernels)
  target_compile_options(narrows_gpu_tests PRIVATE -O0)  # what computes on the host is the library's
  set_source_files_properties("${narrows_gpu_hash}" PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  # Together those that give different things no common name: backward_* apart from the others, graph_test alone.
  narrows_unite(narrows_gpu_tests 0)
  set_target_properties(narrows_gpu_tests PROPERTIES UNITY_BUILD_MODE GROUP)
  foreach(letters IN ITEMS abcdef hijklm nopqrstuvwxyz)
    set(united ${narrows_gpu_test_sources})
    list(FILTER united INCLUDE REGEX "/[${letters}][a-z_]*\\.cpp$")
    set_source_files_properties(${united} PROPERTIES UNITY_GROUP "${letters}")
  endforeach()
  set(united ${narrows_gpu_test_sources})
  list(FILTER united INCLUDE REGEX "/backward_[a-z_]*\\.cpp$")
  set_source_files_properties(${united} PROPERTIES UNITY_GROUP backward)
  target_compile_definitions(narrows_gpu_tests PRIVATE NARROWS_SOURCE_DIR=".")
  target_link_libraries(narrows_gpu_tests PRIVATE nlohmann_json::nlohmann_json)
  target_link_options(narrows_gpu_tests PRIVATE -static-libstdc++ -static-libgcc)
  # One process: where there is no GPU each test only says so.
  add_test(NAME gpu_tests COMMAND narrows_gpu_tests --gtest_brief=1 WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  set_tests_properties(gpu_tests PROPERTIES TIMEOUT 900)
  add_test(NAME gpu_scripts COMMAND ${narrows_python} "${PROJECT_SOURCE_DIR}/tests/gpu/scripts_test.py")
  # Python cannot open a sanitized library.
  add_test(NAME bench_gpu_scripts
    COMMAND ${narrows_python} "${PROJECT_SOURCE_DIR}/tests/tools/bench_gpu_test.py" "$<TARGET_FILE:narrows>")
  add_test(NAME io_model_scripts
    COMMAND ${narrows_python} "${PROJECT_SOURCE_DIR}/tests/tools/io_model_test.py" "$<TARGET_FILE:narrows>")
endif()
add_test(NAME gpu_record
  COMMAND ${narrows_python} "${PROJECT_SOURCE_DIR}/tests/gpu/source_hash.py" "${PROJECT_SOURCE_DIR}" --check)
