// Shared libraries opened while the program runs.
#pragma once

#include <string>

namespace narrows::cuda {

/// Stays open for the life of the process: what it gave out is used until then.
class Library {
 public:
  Library() = default;
  /// Closed when `path` cannot be opened; `reason` then says why.
  Library(const std::string& path, std::string& reason);

  explicit operator bool() const { return handle_ != nullptr; }
  void* symbol(const char* name) const;  // null: not there
  /// False where the library has no such symbol.
  template <class Function> bool find(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(symbol(name));
    return function != nullptr;
  }

 private:
  void* handle_ = nullptr;
};

/// The folder of the file that this code was loaded from: libnarrows, the Python module or a program. Empty: not known.
std::string own_folder();

}  // namespace narrows::cuda
