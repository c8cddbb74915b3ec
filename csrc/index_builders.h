// Pure functions that say which tokens a training sample holds. All counts and positions are 64-bit.
#pragma once

#include <cstdint>

namespace megatron_simple {

// Cuts the documents, in the order of `document_index`, into samples of seq_length + 1 tokens of which neighbours share
// one: the last token of a sample is the first of the next.
// sizes            [num_sequences]     tokens of each sequence
// document_index   [num_positions]     sequence numbers in training order (int32 or int64)
// out              [num_samples + 1, 2] start of each sample: position in document_index, token offset in that document;
//                                      the last row is the last token of the last sample
// std::invalid_argument where the documents hold fewer than num_samples * seq_length + 1 tokens, or an entry of
// document_index or sizes is out of range.
template <class Id>
void build_sample_index(const std::int32_t* sizes, std::int64_t num_sequences, const Id* document_index,
                        std::int64_t num_positions, std::int64_t seq_length, std::int64_t num_samples,
                        std::int64_t* out);

// Chooses a dataset for each of `num_samples` samples so that every prefix follows the weights: after n samples dataset
// d has given weights[d] * n of them, to within 1 - 1 / (2 num_datasets - 2). Taking the dataset that is furthest behind
// its share does not keep to that: with four datasets one can be 1.2 samples behind.
// Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980).
// weights          [num_datasets]      positive, adding up to 1
// dataset_index    [num_samples]       the dataset of each sample
// dataset_samples  [num_samples]       the running number of that sample within its dataset: 0, 1, 2, ...
void build_blending_index(const double* weights, std::int32_t num_datasets, std::int64_t num_samples,
                          std::int32_t* dataset_index, std::int64_t* dataset_samples);

}  // namespace megatron_simple
