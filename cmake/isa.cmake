# One binary runs on any x86-64-v2 machine: files named for an instruction set are compiled for it, the rest for the
# baseline, and the library chooses at run time. NEON is AArch64's baseline. Files of another architecture are not part of
# the library.
set(narrows_isa_names avx2 avx512 avx512bf16 amx)
set(narrows_isa_flags_avx2 -mavx2 -mfma -mf16c)
set(narrows_isa_flags_avx512 -mavx512f -mavx512dq -mavx512bw -mavx512vl -mavx2 -mfma -mf16c)
set(narrows_isa_flags_avx512bf16 ${narrows_isa_flags_avx512} -mavx512bf16)
set(narrows_isa_flags_amx ${narrows_isa_flags_avx512bf16} -mamx-tile -mamx-bf16)

string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" narrows_processor)
if(narrows_processor MATCHES "^(x86_64|amd64)$")
  set(narrows_on_x86 TRUE)
endif()

function(narrows_baseline target)
  # The contract fixes where a product is fused with a sum (design: numerics), so the compiler must not choose.
  target_compile_options(${target} PRIVATE -ffp-contract=off)
  if(narrows_on_x86)
    target_compile_options(${target} PRIVATE -march=x86-64-v2)
  endif()
endfunction()

# Rewrites the source list in place. The order of the result matters: where an inline function of a header was emitted
# into several objects the linker keeps the first, which must be the one that the oldest machine can execute.
function(narrows_apply_isa list_name)
  set(sources ${${list_name}})
  set(ordered ${sources})
  list(JOIN narrows_isa_names "|" any_isa)
  list(FILTER ordered EXCLUDE REGEX "/src/cpu/[^/]*_(${any_isa})\\.cpp$")
  if(NOT narrows_processor MATCHES "^(aarch64|arm64)$")
    list(FILTER ordered EXCLUDE REGEX "/src/cpu/[^/]*_neon\\.cpp$")
  endif()
  # Texts of which every instruction set has its own in the same names.
  set(own_texts ${ordered})
  list(FILTER own_texts INCLUDE REGEX "/src/cpu/[^/]*_(neon|portable)\\.cpp$")
  set_source_files_properties(${own_texts} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  foreach(isa IN LISTS narrows_isa_names)
    set(matching ${sources})
    list(FILTER matching INCLUDE REGEX "/src/cpu/[^/]*_${isa}\\.cpp$")
    if(narrows_on_x86 AND matching)
      set_source_files_properties(${matching} PROPERTIES COMPILE_OPTIONS "${narrows_isa_flags_${isa}}")
      list(APPEND ordered ${matching})
    endif()
  endforeach()
  set(${list_name} ${ordered} PARENT_SCOPE)
endfunction()
