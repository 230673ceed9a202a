# Dependencies of tools and tests; the library itself needs the standard library and threads only.
# Each is taken from the system where it is installed and fetched from its own project otherwise.
include(FetchContent)

macro(narrows_find_tool_dependencies)
  FetchContent_Declare(fmt URL https://github.com/fmtlib/fmt/archive/refs/tags/9.1.0.tar.gz
    DOWNLOAD_EXTRACT_TIMESTAMP ON FIND_PACKAGE_ARGS NAMES fmt)
  FetchContent_Declare(nlohmann_json URL https://github.com/nlohmann/json/archive/refs/tags/v3.11.2.tar.gz
    DOWNLOAD_EXTRACT_TIMESTAMP ON FIND_PACKAGE_ARGS NAMES nlohmann_json)
  FetchContent_Declare(CLI11 URL https://github.com/CLIUtils/CLI11/archive/refs/tags/v2.3.2.tar.gz
    DOWNLOAD_EXTRACT_TIMESTAMP ON FIND_PACKAGE_ARGS NAMES CLI11)
  FetchContent_MakeAvailable(fmt nlohmann_json CLI11)
  narrows_find_libzip()
endmacro()

# pkg-config first: libzip's own CMake package fails to load where its command-line tools are packaged separately.
function(narrows_find_libzip)
  add_library(narrows_libzip INTERFACE)
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(narrows_pc_libzip IMPORTED_TARGET GLOBAL libzip)
  endif()
  if(TARGET PkgConfig::narrows_pc_libzip)
    target_link_libraries(narrows_libzip INTERFACE PkgConfig::narrows_pc_libzip)
    return()
  endif()
  set(BUILD_SHARED_LIBS OFF)
  foreach(part TOOLS REGRESS EXAMPLES DOC)
    set(BUILD_${part} OFF)
  endforeach()
  foreach(codec BZIP2 LZMA ZSTD GNUTLS MBEDTLS OPENSSL)
    set(ENABLE_${codec} OFF)
  endforeach()
  set(LIBZIP_DO_INSTALL OFF)
  FetchContent_Declare(libzip URL https://github.com/nih-at/libzip/archive/refs/tags/v1.10.1.tar.gz
    DOWNLOAD_EXTRACT_TIMESTAMP ON)
  FetchContent_MakeAvailable(libzip)
  target_link_libraries(narrows_libzip INTERFACE zip)
endfunction()

macro(narrows_find_benchmark_dependencies)
  set(BENCHMARK_ENABLE_TESTING OFF)
  set(BENCHMARK_ENABLE_INSTALL OFF)
  FetchContent_Declare(benchmark URL https://github.com/google/benchmark/archive/refs/tags/v1.7.1.tar.gz
    DOWNLOAD_EXTRACT_TIMESTAMP ON FIND_PACKAGE_ARGS NAMES benchmark)
  FetchContent_MakeAvailable(benchmark)
endmacro()

macro(narrows_find_test_dependencies)
  FetchContent_Declare(googletest URL https://github.com/google/googletest/archive/refs/tags/release-1.12.1.tar.gz
    DOWNLOAD_EXTRACT_TIMESTAMP ON FIND_PACKAGE_ARGS NAMES GTest)
  set(INSTALL_GTEST OFF)
  FetchContent_MakeAvailable(googletest)
endmacro()
