#pragma once

#include <string>

#include "moegemm/error.h"

namespace moegemm {

/// Tells the user, once per process and message.
void warn_once(const std::string& message);

/// Around a fork: nobody else changes or reads what has been told.
void hold_warnings();
void release_warnings();

}  // namespace moegemm
