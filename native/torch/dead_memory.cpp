// native/torch/dead_memory.cpp: who dies, and where there is room, see dead_memory.h.
#include "dead_memory.h"

#include <algorithm>
#include <iterator>

namespace plait {
namespace {

struct Taken {
  std::shared_ptr<Rooms> rooms;
  char* at;
  size_t nbytes;
  const void* piece;
};

void give_back(void* context) {
  const std::unique_ptr<Taken> taken(static_cast<Taken*>(context));
  taken->rooms->add(taken->at, taken->nbytes, taken->piece);
}

}  // namespace

void Rooms::add(char* at, size_t nbytes, const void* piece) {
  auto next = free_.lower_bound(at);
  if (next != free_.end() && next->second.piece == piece && next->first == at + nbytes) {
    nbytes += next->second.nbytes;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto& [before, room] = *std::prev(next);
    if (room.piece == piece && before + room.nbytes == at) {
      room.nbytes += nbytes;
      return;
    }
  }
  free_.emplace(at, Room{nbytes, piece});
}

c10::DataPtr Rooms::take(size_t nbytes, c10::Device device) {
  nbytes = whole_blocks(nbytes);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it)
    if (it->second.nbytes >= nbytes &&
        (best == free_.end() || it->second.nbytes < best->second.nbytes))
      best = it;
  if (best == free_.end()) return {nullptr, device};
  const auto [at, room] = *best;
  free_.erase(best);
  if (room.nbytes > nbytes) free_.emplace(at + nbytes, Room{room.nbytes - nbytes, room.piece});
  return {at, new Taken{shared_from_this(), at, nbytes, room.piece}, give_back, device};
}

void DeadMemory::dies(int32_t import, const at::Tensor& t) {
  if (!t.defined() || !t.has_storage() || t.use_count() != 1) return;
  c10::StorageImpl* memory = t.storage().unsafeGetStorageImpl();
  if (memory->nbytes() < static_cast<size_t>(kLentNbytes)) return;
  Dying& d = dying_[memory];
  d.imports.push_back(import);
  if (d.imports.size() > 1) return;
  for (Recording* r : others_)
    for (const Recording::Export& e : r->exports)
      if (e.tensor.defined() && e.tensor.has_storage() &&
          e.tensor.storage().unsafeGetStorageImpl() == memory)
        d.owners.push_back(r);
}

// Finds what is dead by now: held by recordings and by slots that need it no more.
void DeadMemory::lend() {
  std::erase_if(dying_, [this](const auto& entry) {
    const auto& [memory, d] = entry;
    const size_t uses = d.owners.size() + d.imports.size();
    if (d.owners.empty() || c10::raw::intrusive_ptr::use_count(memory) != uses) return false;
    auto* at = static_cast<char*>(const_cast<void*>(memory->data()));
    const void* piece = at;
    for (Recording* r : d.owners) {
      if (at >= r->piece && at < r->piece + r->piece_nbytes) piece = r->piece;
      made_.lenders.push_back(r);
    }
    for (int32_t i : d.imports) made_.lent.push_back({i, memory, at, uses});
    rooms_->add(at, whole_blocks(memory->nbytes()), piece);
    return true;
  });
}

c10::DataPtr DeadMemory::take(int64_t nbytes, c10::Device device) {
  if (nbytes < kLentNbytes) return {nullptr, device};
  lend();
  return rooms_->take(static_cast<size_t>(nbytes), device);
}

}  // namespace plait
