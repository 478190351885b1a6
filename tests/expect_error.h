// tests/expect_error.h: prints the error that a call ends in.
#pragma once
#include <cstdio>
#include <exception>

template <class F>
void expect_error(F f) {
  try {
    f();
    std::printf("no error\n");
  } catch (const std::exception& e) {
    std::printf("error: %s\n", e.what());
  }
}
