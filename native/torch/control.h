// native/torch/control.h: control flow: a program runs others.
//
// - A subprogram has the tables, the host and the library of the program that runs it.
// - It runs within a call: whether the GIL is held is handed on to it and back.
// - Any number of threads may be in it; each run has a frame of its own, which owns what it is
//   given.
#pragma once

#include "code.h"

namespace plait {

// Loads what code.plan.programs are, in order. Throws LoadError.
void load_programs(Code& code);

// Runs what a call of subprograms says. Throws what they throw, and c10::Error for tensors that
// cannot be scanned.
void run_programs(Frame& f, const ProgramsCall& c, const Operands& o);

}  // namespace plait
