#include "cpu/simd/memory/scratch.h"

#include <cassert>
#include <new>

namespace moegemm::cpu::simd {

Scratch& Scratch::of_this_thread() {
  static thread_local Scratch scratch;
  return scratch;
}

Scratch::~Scratch() { ::operator delete (memory_, std::align_val_t{kAlign}); }

void Scratch::reserve(std::int64_t bytes) {
  assert(bytes <= kMaxScratchBytes);
  taken_ = 0;
  if (bytes <= capacity_) return;
  ::operator delete (memory_, std::align_val_t{kAlign});
  memory_ = nullptr;
  capacity_ = 0;
  memory_ = static_cast<std::byte*>(
      ::operator new (static_cast<std::size_t>(bytes), std::align_val_t{kAlign}));
  capacity_ = bytes;
}

void* Scratch::take_bytes(std::int64_t bytes) {
  std::byte* at = memory_ + taken_;
  taken_ += bytes_of<std::byte>(bytes);
  assert(taken_ <= capacity_);
  return at;
}

}  // namespace moegemm::cpu::simd
