#include "testing/device/repeated_memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace moegemm::testing {

#if defined(__linux__)

namespace {

/// A file in memory that holds the block; -1 when there can be none.
int file_of(const std::vector<unsigned char>& block) {
  const int file = memfd_create("moegemm-test-block", MFD_CLOEXEC);
  if (file < 0) return -1;
  const auto size = static_cast<ssize_t>(block.size());
  if (write(file, block.data(), block.size()) == size) return file;
  close(file);
  return -1;
}

}  // namespace

std::unique_ptr<RepeatedMemory> RepeatedMemory::make(const std::vector<unsigned char>& block,
                                                     std::size_t bytes) {
  if (block.empty() || block.size() % kPageBytes != 0 || sysconf(_SC_PAGESIZE) != kPageBytes) {
    return nullptr;
  }
  const int file = file_of(block);
  if (file < 0) return nullptr;
  bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  std::unique_ptr<RepeatedMemory> made;
  if (range != MAP_FAILED) made.reset(new RepeatedMemory(static_cast<char*>(range), bytes));
  for (std::size_t at = 0; made != nullptr && at < bytes; at += block.size()) {
    const void* mapped = mmap(made->data_ + at, std::min(block.size(), bytes - at),
                              PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    if (mapped == MAP_FAILED) made.reset();
  }
  close(file);
  return made;
}

RepeatedMemory::~RepeatedMemory() { munmap(data_, bytes_); }

void RepeatedMemory::set_apart(std::size_t offset, std::size_t bytes, std::uint8_t byte) {
  const std::size_t begin = offset / kPageBytes * kPageBytes;
  const std::size_t length = (offset + bytes + kPageBytes - 1) / kPageBytes * kPageBytes - begin;
  void* own = mmap(data_ + begin, length, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  if (own == MAP_FAILED) throw std::runtime_error("mmap refused pages of an existing range");
  std::memset(own, byte, length);
}

#else

std::unique_ptr<RepeatedMemory> RepeatedMemory::make(const std::vector<unsigned char>&,
                                                     std::size_t) {
  return nullptr;
}
RepeatedMemory::~RepeatedMemory() = default;
void RepeatedMemory::set_apart(std::size_t, std::size_t, std::uint8_t) {}

#endif

}  // namespace moegemm::testing
