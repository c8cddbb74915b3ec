#include "index_builders.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace megatron_simple {
namespace {

constexpr double kRounding = 1e-6;  // of weights times sample counts, far above what doubles lose

}  // namespace

template <class Id>
void build_sample_index(const std::int32_t* sizes, std::int64_t num_sequences, const Id* document_index,
                        std::int64_t num_positions, std::int64_t seq_length, std::int64_t num_samples,
                        std::int64_t* out) {
  if (seq_length < 1 || num_samples < 0) {
    throw std::invalid_argument("a sample index needs a sequence length of at least 1 and no negative sample count");
  }
  std::int64_t position = 0;
  std::int64_t offset = 0;
  const auto size_at = [&](std::int64_t at) -> std::int64_t {
    if (at >= num_positions) {
      throw std::invalid_argument("the documents hold too few tokens for " + std::to_string(num_samples) +
                                  " samples of " + std::to_string(seq_length) + " + 1 tokens");
    }
    const auto id = static_cast<std::int64_t>(document_index[at]);
    if (id < 0 || id >= num_sequences) {
      throw std::invalid_argument("document " + std::to_string(id) + " does not exist; the dataset has " +
                                  std::to_string(num_sequences));
    }
    if (sizes[id] < 0) throw std::invalid_argument("document " + std::to_string(id) + " has a negative size");
    return sizes[id];
  };

  out[0] = 0;
  out[1] = 0;
  for (std::int64_t sample = 1; sample <= num_samples; ++sample) {
    // The next sample starts seq_length tokens on, at a token that exists: it is the last of this sample too.
    std::int64_t ahead = offset + seq_length;
    std::int64_t size = size_at(position);
    while (ahead >= size) {
      ahead -= size;
      size = size_at(++position);
    }
    offset = ahead;
    out[2 * sample] = position;
    out[2 * sample + 1] = offset;
  }
}

template void build_sample_index(const std::int32_t*, std::int64_t, const std::int32_t*, std::int64_t, std::int64_t,
                                 std::int64_t, std::int64_t*);
template void build_sample_index(const std::int32_t*, std::int64_t, const std::int64_t*, std::int64_t, std::int64_t,
                                 std::int64_t, std::int64_t*);

void build_blending_index(const double* weights, std::int32_t num_datasets, std::int64_t num_samples,
                          std::int32_t* dataset_index, std::int64_t* dataset_samples) {
  if (num_datasets < 1) throw std::invalid_argument("a blend needs at least one dataset");
  double total = 0.0;
  for (std::int32_t d = 0; d < num_datasets; ++d) {
    if (!(weights[d] > 0.0)) throw std::invalid_argument("the weights of a blend must be positive");
    total += weights[d];
  }
  if (std::abs(total - 1.0) > kRounding) throw std::invalid_argument("the weights of a blend must add up to 1");

  const double lead = num_datasets > 1 ? 1.0 / (2.0 * num_datasets - 2.0) : 0.0;
  std::vector<std::int64_t> taken(static_cast<std::size_t>(num_datasets), 0);
  for (std::int64_t sample = 0; sample < num_samples; ++sample) {
    // Among the datasets that one more sample would not put too far ahead: the one that falls too far behind first.
    std::int32_t chosen = -1;
    double first_deadline = std::numeric_limits<double>::infinity();
    for (std::int32_t d = 0; d < num_datasets; ++d) {
      const double behind = weights[d] * static_cast<double>(sample + 1) - static_cast<double>(taken[d]);
      const double deadline = (1.0 - lead - behind) / weights[d];  // in samples from here
      if (behind >= lead - kRounding && deadline < first_deadline) {
        chosen = d;
        first_deadline = deadline;
      }
    }
    if (chosen < 0) throw std::logic_error("a blend of which no dataset is due");
    dataset_index[sample] = chosen;
    dataset_samples[sample] = taken[chosen]++;
  }
}

}  // namespace megatron_simple
