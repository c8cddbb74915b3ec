// The Python face of the extension: shapes are checked here, the work is done without the interpreter's lock.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "dataset_format.h"
#include "dataset_writer.h"
#include "index_builders.h"

namespace py = pybind11;
using namespace megatron_simple;

namespace {

// No silent conversion: an array of another type or layout is a mistake of the caller.
template <class T>
using Array = py::array_t<T, py::array::c_style>;

template <class T>
const T* data_of(const Array<T>& array, const char* name) {
  if (array.ndim() != 1) throw std::invalid_argument(std::string(name) + " must have one dimension");
  if (reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) != 0) {
    throw std::invalid_argument(std::string(name) + " must lie aligned in memory");
  }
  return array.data();
}

template <class T>
void add_documents(DatasetWriter& writer, const Array<T>& tokens, const Array<std::int64_t>& lengths) {
  const T* ids = data_of(tokens, "tokens");
  const std::int64_t* counts = data_of(lengths, "lengths");
  const auto num_tokens = static_cast<std::int64_t>(tokens.size());
  const auto num_documents = static_cast<std::int64_t>(lengths.size());
  py::gil_scoped_release unlocked;
  writer.add(ids, num_tokens, counts, num_documents);
}

void write_index_file(const std::string& path, int code, const Array<std::int32_t>& sizes,
                      const Array<std::int64_t>& document_indices) {
  const std::int32_t* lengths = data_of(sizes, "sizes");
  const std::int64_t* ends = data_of(document_indices, "document_indices");
  const auto num_sequences = static_cast<std::int64_t>(sizes.size());
  const auto num_ends = static_cast<std::int64_t>(document_indices.size());
  py::gil_scoped_release unlocked;
  write_index(path, code, lengths, num_sequences, ends, num_ends);
}

template <class Id>
Array<std::int64_t> sample_index(const Array<std::int32_t>& sizes, const Array<Id>& document_index,
                                 std::int64_t seq_length, std::int64_t num_samples) {
  if (num_samples < 0) throw std::invalid_argument("num_samples must not be negative");
  const std::int32_t* lengths = data_of(sizes, "sizes");
  const Id* order = data_of(document_index, "document_index");
  Array<std::int64_t> rows({num_samples + 1, std::int64_t{2}});
  std::int64_t* out = rows.mutable_data();
  const auto num_sequences = static_cast<std::int64_t>(sizes.size());
  const auto num_positions = static_cast<std::int64_t>(document_index.size());
  {
    py::gil_scoped_release unlocked;
    build_sample_index(lengths, num_sequences, order, num_positions, seq_length, num_samples, out);
  }
  return rows;
}

py::tuple blending_index(const Array<double>& weights, std::int64_t num_samples) {
  if (num_samples < 0) throw std::invalid_argument("num_samples must not be negative");
  const double* shares = data_of(weights, "weights");
  Array<std::int32_t> datasets(num_samples);
  Array<std::int64_t> samples(num_samples);
  std::int32_t* dataset_out = datasets.mutable_data();
  std::int64_t* sample_out = samples.mutable_data();
  const auto num_datasets = static_cast<std::int32_t>(weights.size());
  {
    py::gil_scoped_release unlocked;
    build_blending_index(shares, num_datasets, num_samples, dataset_out, sample_out);
  }
  return py::make_tuple(datasets, samples);
}

// FileError becomes OSError with errno, its text and the file's name, as Python's own file functions raise it.
void translate_file_error(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const FileError& error) {
    errno = error.error_number;
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, error.path.c_str());
  }
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Writer of dataset pairs and builders of sample indices.";
  py::register_local_exception_translator(translate_file_error);

  module.attr("MAGIC") = py::bytes(kMagic, sizeof(kMagic));
  module.attr("VERSION") = kVersion;
  module.attr("HEADER_BYTES") = kHeaderBytes;
  py::dict names;
  for (const DataType& type : kDataTypes) names[py::int_(type.code)] = type.name;
  module.attr("DTYPE_NAMES") = names;

  py::class_<DatasetWriter>(module, "DatasetWriter")
      .def(py::init<const std::string&, int>(), py::arg("bin_path"), py::arg("dtype_code"))
      .def("add_documents", &add_documents<std::uint16_t>, py::arg("tokens").noconvert(), py::arg("lengths").noconvert())
      .def("add_documents", &add_documents<std::int32_t>, py::arg("tokens").noconvert(), py::arg("lengths").noconvert())
      .def("add_documents", &add_documents<std::uint32_t>, py::arg("tokens").noconvert(), py::arg("lengths").noconvert())
      .def("add_documents", &add_documents<std::int64_t>, py::arg("tokens").noconvert(), py::arg("lengths").noconvert())
      .def("finish", &DatasetWriter::finish, py::arg("idx_path"), py::call_guard<py::gil_scoped_release>())
      .def("close", &DatasetWriter::close);

  module.def("write_index", &write_index_file, py::arg("path"), py::arg("dtype_code"), py::arg("sizes").noconvert(),
             py::arg("document_indices").noconvert());
  module.def("build_sample_index", &sample_index<std::int32_t>, py::arg("sizes").noconvert(),
             py::arg("document_index").noconvert(), py::kw_only(), py::arg("seq_length"), py::arg("num_samples"));
  module.def("build_sample_index", &sample_index<std::int64_t>, py::arg("sizes").noconvert(),
             py::arg("document_index").noconvert(), py::kw_only(), py::arg("seq_length"), py::arg("num_samples"));
  module.def("build_blending_index", &blending_index, py::arg("weights").noconvert(), py::arg("num_samples"));
}
