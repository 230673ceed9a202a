narrows_find_test_dependencies()
include(GoogleTest)

file(GLOB narrows_test_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/*/*.cpp")
list(FILTER narrows_test_sources EXCLUDE REGEX "/tests/(fuzz|consumer)/")
if(narrows_test_sources)
  add_executable(narrows_tests ${narrows_test_sources})
  narrows_own_code(narrows_tests)
  target_include_directories(narrows_tests PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_definitions(narrows_tests PRIVATE NARROWS_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
    NARROWS_BINARY_DIR="${PROJECT_BINARY_DIR}")
  target_link_libraries(narrows_tests PRIVATE
    narrows_objects $<TARGET_NAME_IF_EXISTS:narrows_tools> GTest::gmock GTest::gtest_main)
  gtest_discover_tests(narrows_tests DISCOVERY_MODE PRE_TEST PROPERTIES TIMEOUT 300)
endif()
