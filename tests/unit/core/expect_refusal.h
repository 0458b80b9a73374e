#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <string>

#include "moegemm/error.h"

namespace moegemm::testing {

/// `call` throws an Error of this kind whose message has all of these parts.
inline void expect_refusal(ErrorKind kind, std::initializer_list<const char*> parts,
                           const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << error.what();
    for (const char* part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "no \"" << part << "\" in \"" << error.what() << "\"";
    }
    return;
  }
  ADD_FAILURE() << "nothing was refused";
}

}  // namespace moegemm::testing
