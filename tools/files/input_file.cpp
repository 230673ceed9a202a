#include "tools/files/input_file.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/files/failure.hpp"

namespace narrows::files {
namespace {

struct Descriptor {
  int value;
  explicit Descriptor(int descriptor) : value(descriptor) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
};

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

std::uint64_t machine_memory() {
  std::ifstream lines("/proc/meminfo");
  std::string key, unit;
  for (std::uint64_t kibibytes = 0; lines >> key >> kibibytes; std::getline(lines, unit))
    if (key == "MemAvailable:") return kibibytes * 1024;
  return static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) /
         2;
}

/// What a container may still take; without a limit, or outside of one, everything.
std::uint64_t control_group_memory() {
  std::uint64_t limit = 0, used = 0;
  std::ifstream("/sys/fs/cgroup/memory.max") >> limit;
  std::ifstream("/sys/fs/cgroup/memory.current") >> used;
  return limit == 0 ? std::numeric_limits<std::uint64_t>::max() : limit - std::min(used, limit);
}

}  // namespace

Source map_file(const std::filesystem::path& path) {
  const std::string name = path.string();
  // Without O_NONBLOCK the opening of a pipe waits for a writer.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat status {};
  if (file.value < 0 || ::fstat(file.value, &status) != 0)
    fail(name, std::string("cannot be opened: ") + std::strerror(errno));
  if (!S_ISREG(status.st_mode)) fail(name, std::string("is ") + kind_of(status.st_mode) + ", not a file");
  if (status.st_size == 0) fail(name, "the file is empty");
  const auto size = static_cast<std::size_t>(status.st_size);
  void* const address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.value, 0);
  if (address == MAP_FAILED) fail(name, std::string("cannot be mapped: ") + std::strerror(errno));
  const std::shared_ptr<const void> owner(address, [size](void* mapped) { ::munmap(mapped, size); });
  return {name, {static_cast<const std::byte*>(address), size}, owner};
}

std::uint64_t available_memory() { return std::min(machine_memory(), control_group_memory()); }

}  // namespace narrows::files
