// The binary format of a dataset pair, as Megatron-LM writes it ("MMIDIDX", version 1). All numbers are little-endian.
//
//   <prefix>.bin   the token ids of all sequences, one after another, in the data type of the pair
//   <prefix>.idx
//     offset           bytes      content
//     0                9          magic "MMIDIDX\0\0"
//     9                8          uint64 version, 1
//     17               1          uint8 code of the data type (table below)
//     18               8          uint64 number of sequences N
//     26               8          uint64 number of document indices M (documents + 1)
//     34               4 N        int32 tokens of each sequence
//     34 + 4 N         8 N        int64 byte offset of each sequence in the .bin file
//     34 + 12 N        8 M        int64 document indices: 0, then one past the last sequence of each document
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the dataset files are little-endian");

namespace megatron_simple {

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};
constexpr std::uint64_t kVersion = 1;
constexpr std::size_t kHeaderBytes = 34;

// One data type of the format. `integer` types can hold token ids; `lowest` and `highest` are the ids that fit.
struct DataType {
  std::uint8_t code;
  const char* name;  // as NumPy spells it
  std::size_t bytes;
  bool integer;
  std::int64_t lowest;
  std::int64_t highest;
};

template <class T>
constexpr DataType integer_type(std::uint8_t code, const char* name) {
  return {code, name, sizeof(T), true, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()};
}

constexpr DataType kDataTypes[] = {
    integer_type<std::uint8_t>(1, "uint8"),   integer_type<std::int8_t>(2, "int8"),
    integer_type<std::int16_t>(3, "int16"),   integer_type<std::int32_t>(4, "int32"),
    integer_type<std::int64_t>(5, "int64"),   {6, "float64", 8, false, 0, 0},
    {7, "float32", 4, false, 0, 0},           integer_type<std::uint16_t>(8, "uint16"),
};

// The integer type behind `code`; std::invalid_argument where the format has none.
inline const DataType& integer_type_of_code(int code) {
  for (const DataType& type : kDataTypes) {
    if (type.code == code && type.integer) return type;
  }
  throw std::invalid_argument("data type code " + std::to_string(code) + " cannot hold token ids");
}

}  // namespace megatron_simple
