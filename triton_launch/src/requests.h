// triton_launch/src/requests.h: what triton_launch/worker.py is asked, and what its answers mean;
// providers.cpp says how they are written.
#pragma once

#include <plait/triton.h>

namespace plait::triton {

std::string to_describe(const std::string& file, const std::string& function);
std::string to_evaluate(const Question& question);
std::string to_compile(const Request& request);
// Throws Error if it is no.
std::string said(const std::string& answer, const std::string& kernel,
                 const std::string& specialization);
Binary compiled(const std::string& pack);

}  // namespace plait::triton
