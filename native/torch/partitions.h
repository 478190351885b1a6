// native/torch/partitions.h: what each partition of a program takes from those before it and leaves
// to those after it, learned once when the program is loaded.
#pragma once

#include "program.h"

namespace plait {

class PartitionLearner {
 public:
  // patches: by root, where kernels read its pointer. writes: (partition, what it writes).
  PartitionLearner(Program& program, const std::vector<std::vector<Patch>>& patches,
                   const std::vector<std::pair<int32_t, SlotId>>& writes);
  void run();  // fills Program's partitions, and makes its Graphs if one can be recorded

 private:
  template <class F>
  void for_steps(const F& f);
  PartitionInfo& partition(int32_t k) { return p_.partitions_[static_cast<size_t>(k)]; }
  int32_t& home(SlotId s) { return home_[static_cast<size_t>(s)]; }
  SlotId memory(SlotId s) const;
  bool is_derived(SlotId s) const;
  void place(int32_t k, const Step& s);
  void make(int32_t k, SlotId s);
  void trace(int32_t k, const Step& s);
  void find(int32_t k, int32_t symbol);
  void read(int32_t k, ExprId e);
  void read(int32_t k, const std::vector<ExprId>& all);
  void read_shape(int32_t k, SlotId s);
  void kernel(int32_t k, Range bufs, bool fixed);
  void see(int32_t k, SlotId s);
  void bring_in(int32_t k, SlotId s, bool fixed);
  void keep(PartitionInfo& p);
  void finish(int32_t k);

  Program& p_;
  const std::vector<std::pair<int32_t, SlotId>>& writes_;
  const int32_t n_;
  std::vector<int32_t> home_;  // by slot: where its memory, or a view's pointer, is made; -1: given
  std::vector<int32_t> last_;  // by slot: the step of its home that touches its memory last
  int32_t at_ = 0;             // the step that is looked at
  std::vector<std::vector<int32_t>> made_;  // by slot: the steps that make a view
  std::vector<bool> exported_, escaping_;
  std::vector<int32_t> symbol_home_;
  std::vector<int32_t> read_by_;            // by expression: the partition that read it last
  std::vector<std::vector<bool>> symbols_;  // by partition: symbols that it reads
};

}  // namespace plait
