// native/python/dicts.h: whether any of some dicts has changed, at next to no cost.
#pragma once

#include <Python.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace plait {

// The dicts are borrowed: whoever made this keeps them alive.
class WatchedDicts {
 public:
  using Versions = std::vector<uint64_t>;
  void add(PyObject* dict);  // throws PythonError
  void clear() { dicts_.clear(), settled_.clear(); }
  Versions versions() const;
  // From now on changed() is whether a key or value of a dict may be another one than at the time
  // of these versions, which may be true where nothing has changed; before, it is true.
  void settle(Versions versions) { settled_ = std::move(versions); }
  bool changed() const;

 private:
  std::vector<PyDictObject*> dicts_;
  Versions settled_;
};

}  // namespace plait
