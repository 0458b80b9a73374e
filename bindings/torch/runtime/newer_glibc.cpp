// Only with MOEGEMM_GLIBC: what the headers and the libstdc++ of a newer glibc ask for, and an
// older one has not.
#define MOEGEMM_INSIDE __attribute__((visibility("hidden")))

extern "C" {

// From 2.32 on. libstdc++ counts references without atomics while this says that the process has
// one thread; a process with torch in it always has more.
extern MOEGEMM_INSIDE char __libc_single_threaded;
char __libc_single_threaded = 0;

// From 2.33 on; std::filesystem calls them. Until then headers made them calls of these, with the
// number that `struct stat` of this architecture has.
struct stat;
int __xstat(int version, const char* path, struct stat* into);
int __lxstat(int version, const char* path, struct stat* into);
#if defined(__x86_64__)
constexpr int kStatVersion = 1;
#else
constexpr int kStatVersion = 0;
#endif
MOEGEMM_INSIDE int stat(const char* path, struct stat* into) {
  return __xstat(kStatVersion, path, into);
}
MOEGEMM_INSIDE int lstat(const char* path, struct stat* into) {
  return __lxstat(kStatVersion, path, into);
}

// From 2.38 on, whose headers call strtol and its like by these names: in C23 they read binary
// numbers too.
long older_strtol(const char*, char**, int) __asm__("strtol");
unsigned long older_strtoul(const char*, char**, int) __asm__("strtoul");
long long older_strtoll(const char*, char**, int) __asm__("strtoll");
unsigned long long older_strtoull(const char*, char**, int) __asm__("strtoull");

MOEGEMM_INSIDE long __isoc23_strtol(const char* text, char** end, int base) {
  return older_strtol(text, end, base);
}
MOEGEMM_INSIDE unsigned long __isoc23_strtoul(const char* text, char** end, int base) {
  return older_strtoul(text, end, base);
}
MOEGEMM_INSIDE long long __isoc23_strtoll(const char* text, char** end, int base) {
  return older_strtoll(text, end, base);
}
MOEGEMM_INSIDE unsigned long long __isoc23_strtoull(const char* text, char** end, int base) {
  return older_strtoull(text, end, base);
}

}  // extern "C"
