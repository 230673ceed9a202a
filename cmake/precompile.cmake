# Compiles a header once for all files of a target. ccache serves such files only when told that it may; the options make
# what the compilers write depend on the header's content alone.
function(narrows_precompile target header)
  target_precompile_headers(${target} PRIVATE "${header}")
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    target_compile_options(${target} PRIVATE "SHELL:-Xclang -fno-pch-timestamp")
  elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  endif()
  if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache$")
    set_target_properties(${target} PROPERTIES CXX_COMPILER_LAUNCHER
      "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros;${CMAKE_CXX_COMPILER_LAUNCHER}")
  endif()
endfunction()

# Most of a file's compile time goes to what it includes: headers, and templates that its neighbours instantiate too.
option(NARROWS_UNITY_BUILD "Compile the library, the tools and the tests some files at a time" OFF)

# Files with compile options of their own stay alone.
function(narrows_unite target files_at_a_time)
  if(NOT NARROWS_UNITY_BUILD)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${files_at_a_time})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Takes the files of a unit for headers, whose unnamed namespaces would differ from one user to the next.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
endfunction()
