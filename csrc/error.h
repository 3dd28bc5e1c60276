// The message of the last failed call, of each thread.
#pragma once
#include "driver.h"

namespace fodit {

constexpr int kErrorLength = 1024;
extern thread_local char last_error[kErrorLength];

}  // namespace fodit

// Ends a function of the C interface: keeps the message and returns 1.
#define FAIL(...) return fodit::fail(fodit::last_error, fodit::kErrorLength, __VA_ARGS__)
