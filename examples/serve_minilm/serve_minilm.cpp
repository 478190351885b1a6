// examples/serve_minilm: a sentence encoder served from C++, without Python in the process.
//
// Usage: serve_minilm PACKAGE TOKENS [THREADS]
//   PACKAGE  what package.py beside this file wrote
//   TOKENS   a text file with the token ids of one sentence a line, which package.py writes too
// Several threads share the loaded package, each encodes some of the sentences. Prints the cosine
// similarity of every pair of sentences, then what a call takes.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <plait/package.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

namespace {

std::vector<at::Tensor> read_sentences(const char* path) {
  std::vector<at::Tensor> sentences;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::vector<int64_t> ids;
    for (int64_t id; words >> id;) ids.push_back(id);
    if (!ids.empty())
      sentences.push_back(
          at::from_blob(ids.data(), {1, static_cast<int64_t>(ids.size())}, at::kLong).clone());
  }
  return sentences;
}

int serve(int argc, char** argv) {
  const plait::Package encoder = plait::Package::load(argv[1]);
  const std::vector<at::Tensor> sentences = read_sentences(argv[2]);
  const size_t n_threads = argc > 3 ? std::strtoul(argv[3], nullptr, 10) : 2;
  const at::Device device(encoder.inputs()[0].device);
  const auto encode = [&](const at::Tensor& sentence) {
    const at::Tensor ids = sentence.to(device);
    return encoder.run({ids, at::ones_like(ids)})[0].cpu();
  };

  std::vector<at::Tensor> embeddings(sentences.size());
  std::vector<std::thread> threads;
  for (size_t t = 0; t < n_threads; ++t)
    threads.emplace_back([&, t] {
      for (size_t k = t; k < sentences.size(); k += n_threads)
        embeddings[k] = encode(sentences[k])[0];
    });
  for (std::thread& t : threads) t.join();

  const at::Tensor all = at::stack(embeddings);  // unit vectors
  const at::Tensor cosines = all.matmul(all.t()).contiguous();
  for (int64_t i = 0; i < cosines.size(0); ++i)
    for (int64_t j = 0; j < cosines.size(1); ++j)
      std::printf("%.6f%c", cosines.const_data_ptr<float>()[i * cosines.size(1) + j],
                  j + 1 < cosines.size(1) ? ' ' : '\n');

  auto best = std::chrono::nanoseconds::max();
  for (int round = 0; round < 5; ++round) {
    const auto start = std::chrono::steady_clock::now();
    encode(sentences[0]);
    best = std::min(best, std::chrono::nanoseconds(std::chrono::steady_clock::now() - start));
  }
  std::fprintf(stderr, "%zu sentences; %s; %.2f ms for the first one\n", sentences.size(),
               encoder.machine().c_str(), static_cast<double>(best.count()) / 1e6);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return std::fprintf(stderr, "usage: %s PACKAGE TOKENS [THREADS]\n", argv[0]), 2;
  try {
    return serve(argc, argv);
  } catch (const std::exception& e) {  // PackageError, InputError and what torch throws
    return std::fprintf(stderr, "%s\n", e.what()), 1;
  }
}
