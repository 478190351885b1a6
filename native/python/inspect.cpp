// native/python/inspect.cpp: what is in a package, as texts for people; nothing of it is loaded.
#include "core/package.h"
#include "python/object.h"

namespace plait {
namespace {
using Pairs = std::vector<std::pair<std::string, std::string>>;

std::string joined(const std::vector<std::string>& sizes) {
  std::string out;
  for (const std::string& s : sizes) out += (out.empty() ? "" : ", ") + s;
  return "(" + out + ")";
}

// A size or an integer. bounds: those of its symbol are added.
std::string dim_text(const Dim& d, const Signature& signature, Pairs& bounds) {
  if (d.kind == Dim::Kind::fixed) return std::to_string(d.value);
  if (d.kind == Dim::Kind::any) return "any";
  const std::string& name = signature.symbols[static_cast<size_t>(d.value)];
  const bool endless = d.hi == std::numeric_limits<int64_t>::max();
  bounds.emplace_back(
      name, std::to_string(d.lo) + (endless ? " or more" : " to " + std::to_string(d.hi)));
  return name;
}

// Of what a call takes.
std::string input_text(const InputSpec& input, const Signature& signature, Pairs& bounds) {
  if (input.kind == InputSpec::Kind::integer)
    return "int " + dim_text(input.integer, signature, bounds);
  std::vector<std::string> sizes;
  for (const Dim& d : input.sizes) sizes.push_back(dim_text(d, signature, bounds));
  return input.dtype + " " + joined(sizes) + " on " + input.device;
}

std::string weight_text(const Manifest::Tensor& t) {
  std::vector<std::string> sizes;
  for (const int64_t n : t.sizes) sizes.push_back(std::to_string(n));
  return std::string(dtype_name(t.dtype)) + " " + joined(sizes);
}

PyObject* dict(const Pairs& pairs) {
  Ref made = Ref::check(PyDict_New());
  for (const auto& [name, value] : pairs)
    put(made.get(), name.c_str(), PyUnicode_FromString(value.c_str()));
  return made.release();
}

PyObject* dict(const Manifest::Texts& names) {
  Pairs pairs;
  for (const std::string& name : names) pairs.emplace_back(name, "");
  return dict(pairs);
}
}  // namespace

PyObject* module_inspect_package(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char* path = nullptr;
    int verify_weights = 0;
    if (!PyArg_ParseTuple(args, "sp", &path, &verify_weights)) return nullptr;
    const PackageFile file(path);
    if (verify_weights)
      file.map_weights()->verify([](size_t n, const std::function<void(size_t)>& body) {
        for (size_t k = 0; k < n; ++k) body(k);
      });
    const Manifest& m = file.manifest();
    Manifest::Texts conditions;
    Pairs inputs, bounds, weights, machines;
    for (const InputSpec& input : m.signature.inputs)
      if (input.kind == InputSpec::Kind::tensor || input.kind == InputSpec::Kind::integer)
        inputs.emplace_back(m.signature.names[static_cast<size_t>(input.arg)],
                            input_text(input, m.signature, bounds));
    for (const Condition& c : m.signature.conditions) conditions.push_back(c.text);
    for (const Manifest::Tensor& t : m.weights) weights.emplace_back(t.name, weight_text(t));
    for (const Manifest::Variant& v : m.variants) {
      size_t nbytes = 0;
      for (const std::string* section : {&v.plan, &v.kernels, &v.cubins})
        if (!section->empty()) nbytes += file.section(*section).size();
      machines.emplace_back(v.machine, std::to_string(nbytes) + " bytes");
    }
    Ref all = Ref::check(PyDict_New());
    put(all.get(), "program", dict(Manifest::Texts{m.name}));
    put(all.get(), "written with", dict(m.versions));
    put(all.get(), "takes", dict(inputs));
    put(all.get(), "sizes", dict(bounds));
    put(all.get(), "conditions", dict(conditions));
    put(all.get(), "gives", dict(m.outputs));
    put(all.get(), "machines", dict(machines));
    put(all.get(), "weights", dict(weights));
    put(all.get(), "folded weights", dict(m.folded));
    return all.release();
  });
}

}  // namespace plait
