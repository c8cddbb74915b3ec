// Writes the .bin and .idx files of a dataset pair (format: dataset_format.h).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "dataset_format.h"

namespace megatron_simple {

// A failed system call on a file: a full disk, a missing folder, no permission.
struct FileError : std::runtime_error {
  FileError(int error_number, const std::string& path);
  int error_number;
  std::string path;
};

// A file opened for writing, emptied if it exists. Writes are gathered into large ones. Not copyable.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, std::size_t bytes);
  // Writes what is buffered, waits until the disk has it, closes. FileError names the file and the cause.
  void close_synced();
  // Closes without a promise about the content.
  void close() noexcept;

 private:
  void flush();

  std::string path_;
  int descriptor_;
  std::vector<char> buffer_;
};

// Streams documents into <bin_path>; `finish` writes <idx_path>. Each document is one sequence.
class DatasetWriter {
 public:
  // `code`: an integer type of kDataTypes.
  DatasetWriter(const std::string& bin_path, int code);

  // Appends `documents` documents whose ids lie one after another in `tokens`; `lengths` are their token counts.
  // std::invalid_argument, with nothing appended, for an id outside the data type, an empty or too long document,
  // or lengths that do not add up to `count`. T: uint16, int32, uint32 or int64.
  template <class T>
  void add(const T* tokens, std::int64_t count, const std::int64_t* lengths, std::int64_t documents);

  void finish(const std::string& idx_path);
  void close() noexcept { bin_.close(); }

 private:
  const DataType& type_;
  OutputFile bin_;
  std::vector<std::int32_t> sizes_;
};

// Writes a whole .idx file. `document_indices` has `num_document_indices` entries; null stands for one sequence per
// document (0, 1, ..., num_sequences), and the count is then ignored.
void write_index(const std::string& path, int code, const std::int32_t* sizes, std::int64_t num_sequences,
                 const std::int64_t* document_indices, std::int64_t num_document_indices);

}  // namespace megatron_simple
