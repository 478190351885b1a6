// native/torch/package.h: a verified package with its tensors in place: all that its Program is
// made of.
#pragma once

#include <c10/util/Exception.h>

#include "core/package.h"
#include "torch/bound.h"

namespace plait {

// By ATen's threads. Throws PackageError.
void verify(Weights& weights);

struct OpenPackage {
  // device: "" for the CPU, or the current GPU. machine: "" for the best variant. verify_weights:
  // those of a GPU are verified, others are left to verify(). Throws PackageError.
  OpenPackage(const std::string& path, const std::string& device, bool verify_weights,
              const std::string& machine);

  // Runs body, which makes the program; says of which file what is missing. Throws PackageError.
  template <class F>
  auto bind(F&& body) const {
    try {
      return body();
    } catch (const PlanError& e) {
      file.fail("section '" + variant->plan + "': " + e.what());
    } catch (const LoadError& e) {
      file.fail(e.what());
    } catch (const cuda::DriverError& e) {
      file.fail(e.what());
    } catch (const c10::Error& e) {
      file.fail(e.what_without_backtrace());
    }
  }
  // Throws PackageError if the described results are not as many as the program's.
  void require_results(const Program& p) const;

  PackageFile file;
  const Manifest::Variant* variant;
  Signature signature;
  std::shared_ptr<Weights> memory;  // of weights and constants
  std::vector<at::Tensor> weights, constants;
  Plan plan;
  std::shared_ptr<Library> kernels;
  std::shared_ptr<Cubins> cubins;
};

}  // namespace plait
