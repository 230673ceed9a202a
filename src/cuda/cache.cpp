#include "cuda/cache.hpp"

#include "core/error.hpp"
#include "cuda/library.hpp"

#include <cstdio>
#include <filesystem>

namespace narrows::cuda {

Cache::Cache(Settings settings) : settings_(std::move(settings)), disk_(settings_.disk) {}

void Cache::find_packs() {
  std::vector<std::shared_ptr<const Pack>> found;
  const auto add = [&](const auto& open) {
    try {
      found.push_back(std::make_shared<const Pack>(open()));
    } catch (const Error& error) {
      fprintf(stderr, "narrows: cache: %s; it is not used\n", error.what());
    }
  };
  if (const PrivateFolder& folder = disk_.folder())
    for (const PrivateFolder::Entry& entry : folder.entries())
      if (entry.name.ends_with(".pack"))
        add([&] { return Pack(folder.open(entry.name), settings_.disk.folder + "/" + entry.name); });
  for (const std::string& path : settings_.own_packs)
    if (std::error_code failure; std::filesystem::exists(path, failure)) add([&] { return open_pack(path); });
  const std::lock_guard lock(mutex_);
  packs_.insert(packs_.end(), found.begin(), found.end());
}

void Cache::add_pack(const std::string& path) {
  auto pack = std::make_shared<const Pack>(open_pack(path));
  const std::lock_guard lock(mutex_);
  packs_.insert(packs_.begin(), std::move(pack));
}

std::optional<Binary> Cache::find_in_packs(const Digest& key) {
  std::call_once(packs_found_, [this] { find_packs(); });
  std::vector<std::shared_ptr<const Pack>> packs;
  {
    const std::lock_guard lock(mutex_);
    packs = packs_;
  }
  for (const auto& pack : packs)
    if (std::optional<Binary> binary = pack->find(key)) return binary;
  return {};
}

Binary Cache::find_or_compile(const Digest& key, const Program& program, std::string_view architecture) {
  if (std::optional<Binary> binary = find_in_packs(key)) return *std::move(binary);
  const CompilerVersion version = settings_.version();
  if (std::optional<Binary> binary = disk_.load(key, version)) return *std::move(binary);
  const DiskCache::Lock lock = disk_.lock(key);
  if (std::optional<Binary> binary = disk_.load(key, version)) return *std::move(binary);
  Binary binary = settings_.compile(program, architecture, settings_.sources);
  disk_.store(key, binary);
  return binary;
}

std::shared_ptr<const Binary> Cache::get(const Program& program, std::string_view architecture) {
  const Digest key = this->key(program, architecture);
  std::shared_ptr<Slot> slot;
  {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Slot>& place = slots_[key];
    if (!place) place = std::make_shared<Slot>();
    slot = place;
  }
  const std::lock_guard one(slot->making);
  if (!slot->binary) slot->binary = std::make_shared<const Binary>(find_or_compile(key, program, architecture));
  return slot->binary;
}

Cache& cache() {
  static Cache& only = *[] {
    Cache::Settings settings;
    settings.disk = disk_settings();
    if (const std::filesystem::path folder = own_folder(); !folder.empty())
      settings.own_packs = {folder / "narrows.pack", folder / NARROWS_LIBRARY_FROM_PROGRAM / "narrows.pack"};
    settings.version = [] {
      const FoundCompiler found = find_compiler();
      if (found.path.empty()) throw Error(ErrorCode::not_implemented, "cuda: " + found.absence);
      return found.version;
    };
    settings.compile = [](const Program& program, std::string_view architecture, std::span<const SourceFile> sources) {
      return compile(program, architecture, sources);
    };
    return new Cache(std::move(settings));
  }();
  return only;
}

void load_pack(const std::string& path) { cache().add_pack(path); }

}  // namespace narrows::cuda
