// libnvrtc, CUDA's run-time compiler, opened when first needed.
#pragma once

#include <string>
#include <vector>

namespace narrows::cuda {

using NvrtcStatus = int;  // 0 = done
using NvrtcProgram = struct NvrtcProgramHandle*;

/// The compiler's functions, under its names for the same.
struct NvrtcFunctions {
  NvrtcStatus (*nvrtcVersion)(int* major, int* minor);
  const char* (*nvrtcGetErrorString)(NvrtcStatus);
  NvrtcStatus (*nvrtcGetNumSupportedArchs)(int* count);
  NvrtcStatus (*nvrtcGetSupportedArchs)(int* all);
  NvrtcStatus (*nvrtcCreateProgram)(NvrtcProgram*, const char* text, const char* name, int headers,
                                    const char* const* texts, const char* const* names);
  NvrtcStatus (*nvrtcDestroyProgram)(NvrtcProgram*);
  NvrtcStatus (*nvrtcCompileProgram)(NvrtcProgram, int count, const char* const* options);
  NvrtcStatus (*nvrtcGetProgramLogSize)(NvrtcProgram, std::size_t*);
  NvrtcStatus (*nvrtcGetProgramLog)(NvrtcProgram, char*);
  NvrtcStatus (*nvrtcGetCUBINSize)(NvrtcProgram, std::size_t*);
  NvrtcStatus (*nvrtcGetCUBIN)(NvrtcProgram, char*);
  NvrtcStatus (*nvrtcGetPTXSize)(NvrtcProgram, std::size_t*);
  NvrtcStatus (*nvrtcGetPTX)(NvrtcProgram, char*);
};

struct CompilerVersion {
  int major = 0, minor = 0;

  bool operator==(const CompilerVersion&) const = default;
  std::string text() const;  // "13.0"
};

/// An NVRTC that is there, perhaps not opened yet: opening it takes longer than reading a kernel from the disk.
struct FoundCompiler {
  std::string path;  // empty: absence says why
  CompilerVersion version;
  std::string absence;
};

/// Where to look, in this order, for each CUDA version from the newest.
struct CompilerPlaces {
  std::string chosen;                // NARROWS_NVRTC: this file, or in this folder, and nowhere else
  std::vector<std::string> folders;  // of libnvrtc.so.MAJOR
  bool by_name = true;               // then where the system's loader looks
};

/// The newest whose CUDA version is at most the driver's (13000 is CUDA 13.0; 0: there is no driver, any will do).
FoundCompiler find_compiler(const CompilerPlaces& places, int driver_version);
/// For this machine and its driver: beside pip's narrows, CUDA toolkits, the loader's path.
FoundCompiler find_compiler();
/// More folders to look in, before the others: what Python knows of where its packages are.
void add_compiler_folders(const std::vector<std::string>& folders);

struct Compiler {
  NvrtcFunctions functions{};
  std::string path;
  CompilerVersion version;
  std::vector<int> architectures;  // that it knows: 80, 90, 120; ascending
};
/// Opens what was found, once. Throws Error (not_implemented) with the absence.
const Compiler& open_compiler(const FoundCompiler& found);

}  // namespace narrows::cuda
