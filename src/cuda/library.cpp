#include "cuda/library.hpp"

#include <dlfcn.h>

#include <filesystem>

namespace narrows::cuda {

Library::Library(const std::string& path, std::string& reason) : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle_) return;
  const char* error = dlerror();
  reason = error ? error : path + ": cannot be opened";
}

void* Library::symbol(const char* name) const { return dlsym(handle_, name); }

std::string own_folder() {
  Dl_info found{};
  if (dladdr(reinterpret_cast<const void*>(&own_folder), &found) == 0 || !found.dli_fname) return {};
  std::error_code failure;
  const std::filesystem::path file = std::filesystem::canonical(found.dli_fname, failure);
  return failure ? std::string() : file.parent_path().string();
}

}  // namespace narrows::cuda
