narrows_find_test_dependencies()

file(GLOB narrows_test_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/*/*.cpp")
list(FILTER narrows_test_sources EXCLUDE REGEX "/tests/(fuzz|consumer|gpu|kernels)/")
if(NOT TARGET narrows_cli)
  list(FILTER narrows_test_sources EXCLUDE REGEX "/tests/tools/cli_")
endif()

# Most of what a test costs is compiling it: hardly optimised, and after a header compiled once for all of many files.
function(narrows_test_program target)
  narrows_own_code(${target})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_options(${target} PRIVATE -O1)
  if(ARGC GREATER 1)
    narrows_precompile(${target} "${PROJECT_SOURCE_DIR}/tests/${ARGV1}")
  endif()
  target_link_libraries(${target} PRIVATE narrows_objects GTest::gmock GTest::gtest_main)
endfunction()

# Kernels, not tests, for several programs. Vectors wider than the baseline's registers, which no function outside those files is
# passed.
foreach(name IN ITEMS wide pairs_wide registers_wide)
  set_source_files_properties("${PROJECT_SOURCE_DIR}/tests/cpu/tile_kernels_${name}.cpp" PROPERTIES
    COMPILE_OPTIONS "-O1;-Wno-psabi;${narrows_unrolled_sanitizer_options}" SKIP_PRECOMPILE_HEADERS ON)
endforeach()
add_library(narrows_wide_kernels OBJECT
  "${PROJECT_SOURCE_DIR}/tests/cpu/tile_kernels_pairs_wide.cpp"
  "${PROJECT_SOURCE_DIR}/tests/cpu/tile_kernels_registers_wide.cpp")
narrows_own_code(narrows_wide_kernels)
target_include_directories(narrows_wide_kernels PRIVATE "${PROJECT_SOURCE_DIR}")
target_link_libraries(narrows_wide_kernels PRIVATE narrows_objects)
get_target_property(narrows_wide_kernel_sources narrows_wide_kernels SOURCES)
list(REMOVE_ITEM narrows_test_sources ${narrows_wide_kernel_sources})

# Of the tests those that meet an instruction set of another machine, for qemu: `make neon`.
if(CMAKE_CROSSCOMPILING)
  find_package(nlohmann_json REQUIRED)
  foreach(target gtest gmock)  # from their sources, which nothing waits for
    target_compile_options(${target} PRIVATE -O0)
  endforeach()
  set(narrows_emulated_test_sources ${narrows_test_sources})
  list(FILTER narrows_emulated_test_sources INCLUDE REGEX
    "/(cpu/(tile_kernels_(test|wide)|(decode_kernels|peak)_test)|api/(backward_)?cases_test|support/cases)\\.cpp$")
  add_executable(narrows_emulated_tests ${narrows_emulated_test_sources})
  narrows_test_program(narrows_emulated_tests support/precompiled.hpp)
  narrows_unite(narrows_emulated_tests 7)
  target_compile_definitions(narrows_emulated_tests PRIVATE NARROWS_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_link_libraries(narrows_emulated_tests PRIVATE narrows_wide_kernels nlohmann_json::nlohmann_json)
  return()
endif()

# Device text on the host: it knows instructions and pragmas that the host's compiler does not (nor unrolls what they ask for
# when hardly optimising), and says itself which products and sums are one operation. Each file alone, because it must meet no
# header of src/shared before its own namespace does. Sanitized are whole kernels, which compute what they read and write, of each
# those with masks, ragged rows and caches: the others have other tiles and rules, and took a tenth of a sanitized build. The files of
# what stays in registers compute little: not optimised, as the brief tests below.
function(narrows_add_kernel_tests target sources)
  add_library(${target} OBJECT ${sources})
  narrows_test_program(${target} kernels/precompiled.hpp)
  target_include_directories(${target} BEFORE PRIVATE "${PROJECT_SOURCE_DIR}/tests/kernels/device")
  target_compile_options(${target} PRIVATE -Wno-unknown-pragmas -Wno-pass-failed -Wno-psabi -ffp-contract=off)
  if(narrows_unrolled_sanitizer_options)  # text of that kind, whose loads of several elements must lie at their multiples
    target_compile_options(${target} PRIVATE ${narrows_unrolled_sanitizer_options} -fsanitize=alignment)
  endif()
endfunction()
file(GLOB narrows_whole_kernel_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/kernels/*_test.cpp")
set(narrows_register_sources ${narrows_whole_kernel_sources})
list(FILTER narrows_whole_kernel_sources INCLUDE REGEX "/[a-z_]+_sm[0-9]+_[^/]*$")
list(REMOVE_ITEM narrows_register_sources ${narrows_whole_kernel_sources})
if(NARROWS_SANITIZE)
  list(FILTER narrows_whole_kernel_sources EXCLUDE REGEX "_sm90_(whole|rules|four)_test\\.cpp$")
endif()
set(narrows_kernel_tests narrows_whole_kernel_tests)
narrows_add_kernel_tests(narrows_whole_kernel_tests "${narrows_whole_kernel_sources}")
if(NOT NARROWS_SANITIZE)
  narrows_add_kernel_tests(narrows_register_tests "${narrows_register_sources}")
  target_compile_options(narrows_register_tests PRIVATE -O0)
  list(APPEND narrows_kernel_tests narrows_register_tests)
endif()

if(narrows_test_sources)
  # Those that compute little are not optimised at all: compiled in half the time.
  set(narrows_brief_test_sources ${narrows_test_sources})
  list(FILTER narrows_brief_test_sources INCLUDE REGEX "/tests/(core|cuda|plan|shared|tools)/")
  list(REMOVE_ITEM narrows_test_sources ${narrows_brief_test_sources})
  set(narrows_alone ${narrows_brief_test_sources})  # tests of two families give the same names to what differs
  list(FILTER narrows_alone INCLUDE REGEX "/tests/plan/sm90_")
  set_source_files_properties(${narrows_alone} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  add_library(narrows_brief_tests OBJECT ${narrows_brief_test_sources})
  add_executable(narrows_tests ${narrows_test_sources} $<TARGET_OBJECTS:narrows_brief_tests>)
  target_link_libraries(narrows_tests PRIVATE narrows_wide_kernels ${narrows_kernel_tests})
  foreach(target IN ITEMS narrows_brief_tests narrows_tests)
    narrows_test_program(${target} support/precompiled.hpp)
    narrows_unite(${target} 7)
    target_compile_definitions(${target} PRIVATE NARROWS_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
      NARROWS_BINARY_DIR="${PROJECT_BINARY_DIR}")
    target_link_libraries(${target} PRIVATE $<TARGET_NAME_IF_EXISTS:narrows_tools>)
    if(TARGET narrows_cli)
      add_dependencies(${target} narrows_cli)
      target_compile_definitions(${target} PRIVATE NARROWS_CLI="$<TARGET_FILE:narrows_cli>")
    endif()
  endforeach()
  target_compile_options(narrows_brief_tests PRIVATE -O0)
  # Starting a process for each test costs 30 ms, half a second under a sanitizer: shards of them instead, each with a report
  # of its own. A prime number, so that tests of one case, which lie a fixed distance apart, do not meet in a shard.
  set(narrows_shards 23)
  math(EXPR last_shard "${narrows_shards} - 1")
  foreach(shard RANGE ${last_shard})
    add_test(NAME narrows_tests_${shard}
      COMMAND narrows_tests "--gtest_output=xml:${PROJECT_BINARY_DIR}/reports/narrows_tests_${shard}.xml")
    set_tests_properties(narrows_tests_${shard} PROPERTIES TIMEOUT 900
      ENVIRONMENT "GTEST_TOTAL_SHARDS=${narrows_shards};GTEST_SHARD_INDEX=${shard}")
  endforeach()

  # The tests in which threads meet, for ThreadSanitizer: `make tsan`.
  set(narrows_thread_test_sources ${narrows_test_sources} ${narrows_brief_test_sources})
  list(FILTER narrows_thread_test_sources INCLUDE REGEX
    "/([a-z_]*threads|pool|forward_bits|invariant)_test\\.cpp$")
  add_executable(narrows_thread_tests EXCLUDE_FROM_ALL ${narrows_thread_test_sources})
  narrows_test_program(narrows_thread_tests support/precompiled.hpp)
  narrows_unite(narrows_thread_tests 7)
  target_link_libraries(narrows_thread_tests PRIVATE narrows_wide_kernels)
endif()

# What is asked of CUDA's driver, with a stand-in for it: in a program of its own, because a process finds one driver.
add_library(narrows_fake_cuda MODULE "${PROJECT_SOURCE_DIR}/tests/cuda/fake/libcuda.cpp")
narrows_own_code(narrows_fake_cuda)
target_include_directories(narrows_fake_cuda PRIVATE
  "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/include")
target_link_options(narrows_fake_cuda PRIVATE "LINKER:-soname,libcuda.so.1")
add_executable(narrows_driver_tests "${PROJECT_SOURCE_DIR}/tests/cuda/fake/driver_test.cpp"
  "${PROJECT_SOURCE_DIR}/tests/cuda/fake/calls_test.cpp")
narrows_test_program(narrows_driver_tests)
narrows_unite(narrows_driver_tests 7)
target_compile_options(narrows_driver_tests PRIVATE -O0)
add_dependencies(narrows_driver_tests narrows_fake_cuda)
target_compile_definitions(narrows_driver_tests PRIVATE NARROWS_FAKE_CUDA="$<TARGET_FILE:narrows_fake_cuda>")
add_test(NAME narrows_driver_tests
  COMMAND narrows_driver_tests "--gtest_output=xml:${PROJECT_BINARY_DIR}/reports/narrows_driver_tests.xml")
set_tests_properties(narrows_driver_tests PROPERTIES TIMEOUT 60)

if(Python3_FOUND)
  set(narrows_python "${Python3_EXECUTABLE}" -B)
  include(cmake/gpu_tests.cmake)
  add_test(NAME layers COMMAND ${narrows_python} "${PROJECT_SOURCE_DIR}/tests/layers.py" "${PROJECT_SOURCE_DIR}")
  add_test(NAME layers_test COMMAND ${narrows_python} "${PROJECT_SOURCE_DIR}/tests/layers_test.py")
  add_test(NAME bench_scripts COMMAND ${narrows_python} "${PROJECT_SOURCE_DIR}/tests/tools/bench_scripts_test.py")
  add_test(NAME compile_kernels_script
    COMMAND ${narrows_python} "${PROJECT_SOURCE_DIR}/tests/tools/compile_kernels_test.py")
  add_test(NAME mutations_apply
    COMMAND ${narrows_python} "${PROJECT_SOURCE_DIR}/tests/mutations/run.py" "${PROJECT_SOURCE_DIR}")
endif()

# Of the library as it is shipped: a sanitizer adds symbols and libraries of its own.
if(Python3_FOUND AND NOT NARROWS_SANITIZE AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  set(narrows_symbols ${narrows_python} "${PROJECT_SOURCE_DIR}/tests/symbols.py")
  if(BUILD_SHARED_LIBS)
    add_test(NAME symbols_exported COMMAND ${narrows_symbols} exported "$<TARGET_FILE:narrows>")
    add_test(NAME symbols_needed COMMAND ${narrows_symbols} needed "$<TARGET_FILE:narrows>")
  endif()
  add_test(NAME symbols_isa COMMAND ${narrows_symbols} isa "$<TARGET_FILE:narrows_objects>")
  if(NARROWS_INSTALL)
    foreach(prefix "prefix" "a prefix")
      string(MAKE_C_IDENTIFIER "${prefix}" name)
      add_test(NAME consumer_${name} COMMAND ${narrows_python} "${PROJECT_SOURCE_DIR}/tests/consumer/check.py"
        "${PROJECT_BINARY_DIR}" "${prefix}" "${PROJECT_VERSION}" "${CMAKE_CXX_COMPILER}")
    endforeach()
  endif()
endif()

# The C interface as a C program meets it: compiled as C11, linked with the library that is installed.
enable_language(C)
foreach(name IN ITEMS api gradients)
  add_executable(narrows_c_${name}_test "${PROJECT_SOURCE_DIR}/tests/api/c_${name}_test.c")
  narrows_own_code(narrows_c_${name}_test)
  target_include_directories(narrows_c_${name}_test PRIVATE "${PROJECT_SOURCE_DIR}")
  set_target_properties(narrows_c_${name}_test PROPERTIES
    C_STANDARD 11 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF LINKER_LANGUAGE CXX)
  target_link_libraries(narrows_c_${name}_test PRIVATE narrows Threads::Threads m)
  add_test(NAME c_${name} COMMAND narrows_c_${name}_test)
  set_tests_properties(c_${name} PROPERTIES TIMEOUT 60)
endforeach()
