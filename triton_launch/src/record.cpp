// triton_launch/src/record.cpp: what a record does at a launch beyond the call's own words: tensor
// maps, tensors that are zeroed, scratch memory.
#include "site.h"

namespace plait::triton::detail {

Loaded::Loaded(const cuda::Driver& driver, const Binary& b, const std::vector<Slot>& slots)
    : kernel(driver, b.image.data(),
             {.symbol = b.symbol,
              .num_warps = b.num_warps,
              .num_ctas = b.num_ctas,
              .shared = b.shared,
              .global_scratch = b.global_scratch,
              .global_alignment = b.global_alignment,
              .profile_scratch = b.profile_scratch,
              .profile_alignment = b.profile_alignment,
              .cooperative = b.cooperative,
              .pdl = b.pdl},
             slots.size()) {
  for (size_t k = 0; k < slots.size(); ++k) {
    const size_t nbytes = kernel.parameter_nbytes(k);
    if (nbytes != 0 && nbytes != slots[k].nbytes)
      throw std::runtime_error("parameter " + std::to_string(k) + " of the compiled kernel has " +
                               std::to_string(nbytes) + " bytes, its type " +
                               std::to_string(slots[k].nbytes));
  }
}

void Record::refuse(const Slot& slot, const char* why) const {
  const auto p = static_cast<size_t>(slot.parameter);
  throw Error("argument " + std::to_string(p) + " (" + signature->parameters[p].name +
                  "), a tensor descriptor: " + why,
              function->name, specialization.text, slot.parameter);
}

void Record::make(TensorMap& map, const Recipe& r, const Fields& fields) const {
  constexpr size_t n = Extents::max_rank;
  constexpr int no_interleave = 0, promote_128_bytes = 2;
  const size_t rank = fields.rank();
  uint64_t shape[n], strides[n];  // the innermost first, in bytes
  uint32_t block[n], ones[n] = {1, 1, 1, 1, 1};
  for (size_t k = 0; k < rank; ++k) {
    const size_t from = rank - 1 - k;
    shape[k] = static_cast<uint64_t>(fields.shape(from)) << (r.is_fp4 && k == 0);
    block[k] = r.block[from];
    if (from > 0) strides[k] = static_cast<uint64_t>(fields.stride(from - 1) * r.nbytes);
  }
  strides[rank - 1] =
      shape[rank - 1] * (rank == 1 ? static_cast<uint64_t>(r.nbytes) : strides[rank - 2]);
  map.last_extent = static_cast<int64_t>(shape[0]);
  told(function->name, specialization.text, [&] {
    driver->check(encode(map.bytes, r.type, static_cast<uint32_t>(rank),
                         reinterpret_cast<void*>(fields.base()), shape, strides, block, ones,
                         no_interleave, r.swizzle, promote_128_bytes, fields.nan()),
                  "cuTensorMapEncodeTiled");
  });
}

bool Record::clear(const uint64_t* words, std::span<const uint64_t> nbytes, Stream stream) const {
  if (nbytes.empty()) return cleared.empty();
  for (const Cleared& c : cleared) {
    if (words[c.word] == 0) continue;
    if (nbytes[c.argument] == 0)
      throw Error("a pre_hook zeroes " + signature->parameters[c.parameter].name +
                      ", whose length is not known: pass a "
                      "dense tensor or plait::triton::Pointer{data, dtype, nbytes}",
                  function->name, specialization.text, static_cast<int>(c.parameter));
    told(function->name, specialization.text, [&] {
      triton::clear(*driver, reinterpret_cast<void*>(words[c.word]), nbytes[c.argument], stream);
    });
  }
  return true;
}

Memory Record::scratch(const Launched& l, int64_t nbytes, int64_t alignment) const {
  size_t all = l.num_ctas;
  for (const int64_t factor : {l.grid.x, l.grid.y, l.grid.z, nbytes})
    if (__builtin_mul_overflow(all, static_cast<size_t>(factor), &all)) all = SIZE_MAX;
  return told(function->name, specialization.text,
              [&] { return Memory(*driver, all, static_cast<size_t>(alignment), l.stream); });
}

}  // namespace plait::triton::detail
