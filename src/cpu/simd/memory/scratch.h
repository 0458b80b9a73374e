#pragma once

#include <cstddef>
#include <cstdint>

namespace moegemm::cpu::simd {

/// Memory of one worker thread, kept from call to call and grown to the largest request of the
/// process, at most kMaxScratchBytes.
class Scratch {
 public:
  /// The calling thread's.
  static Scratch& of_this_thread();

  /// Makes room for `bytes`, any contents; what was handed out before is void.
  void reserve(std::int64_t bytes);

  /// The next `count` elements, on a cache line of their own.
  template <class T>
  T* take(std::int64_t count) {
    return static_cast<T*>(take_bytes(count * static_cast<std::int64_t>(sizeof(T))));
  }

  /// What `count` elements take up, for reserve.
  template <class T>
  static constexpr std::int64_t bytes_of(std::int64_t count) {
    return (count * static_cast<std::int64_t>(sizeof(T)) + kAlign - 1) / kAlign * kAlign;
  }

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

 private:
  static constexpr std::int64_t kAlign = 64;

  void* take_bytes(std::int64_t bytes);

  std::byte* memory_ = nullptr;
  std::int64_t capacity_ = 0;
  std::int64_t taken_ = 0;
};

/// 512 KiB: a packed block fills half of a 1 MiB second-level cache; what streams past it has the
/// other half.
constexpr std::int64_t kPanelWords = 512 * 1024 / 4;

/// What a worker may need, whatever the problem: panels, copies, partial sums and row pointers of
/// one block. dW with long segments comes nearest, with about 1.8 MiB.
constexpr std::int64_t kMaxScratchBytes = 2 * 1024 * 1024;

}  // namespace moegemm::cpu::simd
