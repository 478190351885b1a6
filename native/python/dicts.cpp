// native/python/dicts.cpp: changes of dicts, as the versions of Python tell of them.
#include "python/dicts.h"

#include "python/object.h"

namespace plait {

#if PY_VERSION_HEX >= 0x030C0000
// Python calls back when a watched dict is about to change: one count for all of them. A dict stays
// watched until it dies; others may watch it too.
namespace {
uint64_t changes = 0;  // under the GIL

int count_change(PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
  ++changes;
  return 0;
}
// -1: all that Python has are taken.
int watcher() {
  static const int id = PyDict_AddWatcher(count_change);
  if (id < 0) PyErr_Clear();
  return id;
}
}  // namespace

void WatchedDicts::add(PyObject* dict) {
  if (watcher() >= 0 && PyDict_Watch(watcher(), dict) < 0) throw PythonError{};
  dicts_.push_back(reinterpret_cast<PyDictObject*>(dict));
}
WatchedDicts::Versions WatchedDicts::versions() const { return {changes}; }
bool WatchedDicts::changed() const {
  return !dicts_.empty() && (settled_.empty() || settled_[0] != changes || watcher() < 0);
}
#else
// A dict has a number that no dict ever had before each change.
void WatchedDicts::add(PyObject* dict) { dicts_.push_back(reinterpret_cast<PyDictObject*>(dict)); }
WatchedDicts::Versions WatchedDicts::versions() const {
  Versions now;
  for (const PyDictObject* d : dicts_) now.push_back(d->ma_version_tag);
  return now;
}
bool WatchedDicts::changed() const {
  if (settled_.size() != dicts_.size()) return true;
  bool same = true;
  for (size_t i = 0; i < dicts_.size(); ++i) same &= dicts_[i]->ma_version_tag == settled_[i];
  return !same;
}
#endif

}  // namespace plait
