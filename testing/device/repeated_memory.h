#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace moegemm::testing {

/// An address range of the CPU, as long as wanted, that shows one block over and over: the same few
/// megabytes of memory, mapped many times. Getting gigabytes of pages takes longer than most tests.
class RepeatedMemory {
 public:
  static constexpr std::size_t kPageBytes = 4096;

  /// `block` is made of whole pages. nullptr where the system does not map memory twice.
  static std::unique_ptr<RepeatedMemory> make(const std::vector<unsigned char>& block,
                                              std::size_t bytes);
  static bool possible() { return make(std::vector<unsigned char>(kPageBytes), 1) != nullptr; }
  ~RepeatedMemory();
  RepeatedMemory(const RepeatedMemory&) = delete;
  RepeatedMemory& operator=(const RepeatedMemory&) = delete;

  char* data() const { return data_; }
  /// Gives the pages of these bytes memory of their own, full of `byte`.
  void set_apart(std::size_t offset, std::size_t bytes, std::uint8_t byte);

 private:
  RepeatedMemory(char* data, std::size_t bytes) : data_(data), bytes_(bytes) {}

  char* data_;
  std::size_t bytes_;
};

}  // namespace moegemm::testing
