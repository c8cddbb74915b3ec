#include "dataset_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace megatron_simple {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{4} << 20;
constexpr std::size_t kBlock = 1 << 16;  // numbers converted at a time
constexpr std::int64_t kLongestSequence = std::numeric_limits<std::int32_t>::max();

template <class T>
void check_tokens(const T* tokens, std::int64_t count, const DataType& type) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto id = static_cast<std::int64_t>(tokens[i]);
    if (id < type.lowest || id > type.highest) {
      throw std::invalid_argument("token id " + std::to_string(id) + " does not fit " + type.name + " (" +
                                  std::to_string(type.lowest) + " to " + std::to_string(type.highest) +
                                  "); the tokenizer has larger ids than the vocabulary size that chose this type");
    }
  }
}

void check_lengths(const std::int64_t* lengths, std::int64_t documents, std::int64_t count) {
  std::int64_t left = count;
  for (std::int64_t i = 0; i < documents; ++i) {
    if (lengths[i] <= 0 || lengths[i] > kLongestSequence) {
      throw std::invalid_argument("document " + std::to_string(i) + " of this call has " +
                                  std::to_string(lengths[i]) + " tokens; a document holds 1 to " +
                                  std::to_string(kLongestSequence));
    }
    left -= lengths[i];
    if (left < 0) break;
  }
  if (left != 0) {
    throw std::invalid_argument("the documents' lengths do not add up to the " + std::to_string(count) +
                                " tokens given");
  }
}

template <class Target, class T>
void write_as(OutputFile& file, const T* tokens, std::int64_t count) {
  std::vector<Target> block;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const T* end = tokens + std::min<std::int64_t>(count, begin + kBlock);
    block.assign(tokens + begin, end);
    file.write(block.data(), block.size() * sizeof(Target));
  }
}

// Writes `count` int64 numbers made one by one, without holding them all.
template <class Next>
void write_int64s(OutputFile& file, std::int64_t count, Next next) {
  std::vector<std::int64_t> block;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    block.resize(std::min<std::int64_t>(kBlock, count - begin));
    for (std::size_t i = 0; i < block.size(); ++i) block[i] = next(begin + static_cast<std::int64_t>(i));
    file.write(block.data(), block.size() * sizeof(std::int64_t));
  }
}

}  // namespace

FileError::FileError(int number, const std::string& name)
    : std::runtime_error(name + ": " + std::strerror(number)), error_number(number), path(name) {}

OutputFile::OutputFile(const std::string& path) : path_(path) {
  descriptor_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) throw FileError(errno, path_);
  buffer_.reserve(kBufferBytes);
}

OutputFile::~OutputFile() { close(); }

void OutputFile::write(const void* data, std::size_t bytes) {
  const char* source = static_cast<const char*>(data);
  while (bytes > 0) {
    const std::size_t part = std::min(bytes, kBufferBytes - buffer_.size());
    buffer_.insert(buffer_.end(), source, source + part);
    source += part;
    bytes -= part;
    if (buffer_.size() == kBufferBytes) flush();
  }
}

void OutputFile::flush() {
  std::size_t done = 0;
  while (done < buffer_.size()) {
    const ssize_t written = ::write(descriptor_, buffer_.data() + done, buffer_.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw FileError(errno, path_);
    done += static_cast<std::size_t>(written);
  }
  buffer_.clear();
}

void OutputFile::close_synced() {
  flush();
  if (::fsync(descriptor_) != 0) throw FileError(errno, path_);
  const int result = ::close(descriptor_);
  descriptor_ = -1;
  if (result != 0) throw FileError(errno, path_);
}

void OutputFile::close() noexcept {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

DatasetWriter::DatasetWriter(const std::string& bin_path, int code)
    : type_(integer_type_of_code(code)), bin_(bin_path) {}

template <class T>
void DatasetWriter::add(const T* tokens, std::int64_t count, const std::int64_t* lengths, std::int64_t documents) {
  check_lengths(lengths, documents, count);
  check_tokens(tokens, count, type_);
  switch (type_.code) {
    case 1: write_as<std::uint8_t>(bin_, tokens, count); break;
    case 2: write_as<std::int8_t>(bin_, tokens, count); break;
    case 3: write_as<std::int16_t>(bin_, tokens, count); break;
    case 4: write_as<std::int32_t>(bin_, tokens, count); break;
    case 5: write_as<std::int64_t>(bin_, tokens, count); break;
    case 8: write_as<std::uint16_t>(bin_, tokens, count); break;
    default: throw std::logic_error("an integer type without a writer");
  }
  sizes_.insert(sizes_.end(), lengths, lengths + documents);
}

template void DatasetWriter::add(const std::uint16_t*, std::int64_t, const std::int64_t*, std::int64_t);
template void DatasetWriter::add(const std::int32_t*, std::int64_t, const std::int64_t*, std::int64_t);
template void DatasetWriter::add(const std::uint32_t*, std::int64_t, const std::int64_t*, std::int64_t);
template void DatasetWriter::add(const std::int64_t*, std::int64_t, const std::int64_t*, std::int64_t);

void DatasetWriter::finish(const std::string& idx_path) {
  bin_.close_synced();
  write_index(idx_path, type_.code, sizes_.data(), static_cast<std::int64_t>(sizes_.size()), nullptr, 0);
}

void write_index(const std::string& path, int code, const std::int32_t* sizes, std::int64_t num_sequences,
                 const std::int64_t* document_indices, std::int64_t num_document_indices) {
  const DataType& type = integer_type_of_code(code);
  const bool one_to_one = document_indices == nullptr;
  const std::uint64_t counts[2] = {static_cast<std::uint64_t>(num_sequences),
                                   static_cast<std::uint64_t>(one_to_one ? num_sequences + 1 : num_document_indices)};
  OutputFile file(path);
  file.write(kMagic, sizeof(kMagic));
  file.write(&kVersion, sizeof(kVersion));
  file.write(&type.code, sizeof(type.code));
  file.write(counts, sizeof(counts));
  file.write(sizes, static_cast<std::size_t>(num_sequences) * sizeof(std::int32_t));

  std::int64_t offset = 0;  // 64 bits from the first addition: a .bin of 2 GiB and more is usual
  write_int64s(file, num_sequences, [&](std::int64_t i) {
    const std::int64_t pointer = offset;
    offset += static_cast<std::int64_t>(sizes[i]) * static_cast<std::int64_t>(type.bytes);
    return pointer;
  });
  write_int64s(file, static_cast<std::int64_t>(counts[1]),
               [&](std::int64_t i) { return one_to_one ? i : document_indices[i]; });
  file.close_synced();
}

}  // namespace megatron_simple
