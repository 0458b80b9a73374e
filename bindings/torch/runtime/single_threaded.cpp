// Only with MOEGEMM_GLIBC. libstdc++ counts references without atomics while this says that the
// process has one thread. glibc has it from 2.32 on; a process with torch in it always has more.
extern "C" {
extern __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
}
