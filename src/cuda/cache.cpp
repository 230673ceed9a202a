#include "cuda/cache.hpp"

namespace narrows::cuda {

std::shared_ptr<const Binary> Cache::get(const Program& program, std::string_view architecture) {
  std::shared_ptr<Slot> slot;
  {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Slot>& place = slots_[content_key(program, architecture)];
    if (!place) place = std::make_shared<Slot>();
    slot = place;
  }
  const std::lock_guard one(slot->making);
  if (!slot->binary) slot->binary = std::make_shared<const Binary>(compile_(program, architecture));
  return slot->binary;
}

Cache& cache() {
  static Cache& only = *new Cache([](const Program& program, std::string_view arch) { return compile(program, arch); });
  return only;
}

}  // namespace narrows::cuda
