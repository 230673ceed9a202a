set(NARROWS_SANITIZE "" CACHE STRING "Sanitizers for this project's code, comma-separated: address,undefined or thread")

add_library(narrows_sanitizers INTERFACE)
if(NARROWS_SANITIZE)
  set(narrows_sanitizer_flags -fsanitize=${NARROWS_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_compile_options(narrows_sanitizers INTERFACE ${narrows_sanitizer_flags})
  target_link_options(narrows_sanitizers INTERFACE ${narrows_sanitizer_flags})
endif()
if(NARROWS_BUILD_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "NARROWS_BUILD_FUZZ=ON needs clang for libFuzzer, but the compiler is ${CMAKE_CXX_COMPILER_ID}; "
      "configure with -DCMAKE_CXX_COMPILER=clang++ or NARROWS_BUILD_FUZZ=OFF")
  endif()
endif()

# Files of unrolled vector code: checking each pointer before it is used took 60 s of 73 to compile one; AddressSanitizer looks
# at what is read and written.
set(narrows_unrolled_sanitizer_options "")
if(NARROWS_SANITIZE MATCHES "undefined")
  set(narrows_unrolled_sanitizer_options -fno-sanitize=null,alignment,object-size,pointer-overflow,vptr)
endif()

# What sanitized tests wait for is the oracle: optimised they take 0.4 of the time. Nor does a fuzzer learn from its branches, or
# from those of the tile kernels, so these are spared the counters that guide it.
function(narrows_sanitize_library target)
  if(NOT NARROWS_SANITIZE)
    return()
  endif()
  get_target_property(oracle ${target} SOURCES)
  set(unguided ${oracle})
  set(unrolled ${oracle})
  list(FILTER oracle INCLUDE REGEX "/src/cpu/reference[^/]*$")
  list(FILTER unrolled INCLUDE REGEX "/src/cpu/(tile_kernels|peak)[^/]*$")
  list(FILTER unguided INCLUDE REGEX "/src/cpu/(reference|tile_kernels|peak)[^/]*$")
  set_property(SOURCE ${oracle} APPEND PROPERTY COMPILE_OPTIONS -O2)
  set_property(SOURCE ${unrolled} APPEND PROPERTY COMPILE_OPTIONS ${narrows_unrolled_sanitizer_options})
  if(NARROWS_BUILD_FUZZ)
    set_property(SOURCE ${unguided} APPEND PROPERTY COMPILE_OPTIONS -fno-sanitize=fuzzer-no-link)
  endif()
endfunction()

function(narrows_guide_fuzzers target)
  if(NARROWS_BUILD_FUZZ)
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
    target_link_options(${target} INTERFACE -fsanitize=fuzzer-no-link)
  endif()
endfunction()
