#pragma once

/// Marks what the shared library exports; everything else is built with hidden visibility.
#if defined(_WIN32)
#define MOEGEMM_API
#else
#define MOEGEMM_API __attribute__((visibility("default")))
#endif
