// Files that are as they should be: written by us and read back, and written by NumPy and safetensors and read.
#include <cstdint>
#include <numeric>

#include "tests/tools/files_support.hpp"
#include "tools/files/npy.hpp"
#include "tools/files/npz.hpp"
#include "tools/files/safetensors.hpp"

namespace narrows::files {
namespace {

using Half = std::uint16_t;

Array only(const TensorFile& file) {
  EXPECT_EQ(file.arrays.size(), 1U);
  return file.arrays.at(0);
}

struct Sample {
  DType dtype;
  std::string bytes;  // of six elements
};

std::vector<Sample> samples() {
  std::vector<Sample> all;
  for (const DType dtype :
       {DType::fp16, DType::bf16, DType::fp32, DType::fp64, DType::int32, DType::int64, DType::uint8}) {
    std::string bytes(6 * item_size(dtype), '\0');
    std::iota(bytes.begin(), bytes.end(), '\3');
    all.push_back({dtype, bytes});
  }
  all.push_back({DType::boolean, std::string("\1\0\1\1\0\1", 6)});
  return all;
}

TEST(Files, every_dtype_comes_back_bit_for_bit_in_every_format) {
  const TemporaryDirectory directory;
  for (const std::string extension : {".npy", ".npz", ".safetensors"}) {
    for (const Sample& sample : samples()) {
      if (sample.dtype == DType::bf16 && extension != ".safetensors") continue;
      SCOPED_TRACE(extension + " " + std::string(name(sample.dtype)));
      const Array written{"a", sample.dtype, {3, 2}, {}, std::as_bytes(std::span(sample.bytes)), nullptr};
      write_tensor_file(directory / ("a" + extension), std::span(&written, 1));
      const Array read = only(read_tensor_file(directory / ("a" + extension)));
      EXPECT_EQ(read.name, "a");
      EXPECT_EQ(read.dtype, sample.dtype);
      EXPECT_EQ(read.shape, (Dims{3, 2}));
      EXPECT_EQ(read.strides, (Dims{2, 1}));
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(read.bytes.data()), read.bytes.size()), sample.bytes);
    }
  }
}

TEST(Files, rank_0_to_5_and_size_0_come_back_in_every_format) {
  const TemporaryDirectory directory;
  const std::vector<std::int32_t> values{1, 2, 3, 4, 5, 6};
  for (const std::string extension : {".npy", ".npz", ".safetensors"}) {
    for (const Dims& shape :
         {Dims{}, Dims{6}, Dims{2, 3}, Dims{1, 6, 1}, Dims{2, 1, 3, 1}, Dims{1, 2, 1, 3, 1}, Dims{0}, Dims{4, 0, 2}}) {
      std::int64_t count = 1;
      for (const std::int64_t size : shape) count *= size;
      Array written = array_of("a", DType::int32, shape, values);
      written.bytes = written.bytes.first(static_cast<std::size_t>(4 * count));
      write_tensor_file(directory / ("a" + extension), std::span(&written, 1));
      const Array read = only(read_tensor_file(directory / ("a" + extension)));
      EXPECT_EQ(read.shape, shape) << extension;
      EXPECT_EQ(values_of<std::int32_t>(read), std::vector<std::int32_t>(values.begin(), values.begin() + count))
          << extension;
    }
  }
}

TEST(Files, several_arrays_keep_their_names_and_are_aligned) {
  const TemporaryDirectory directory;
  const std::vector<std::uint8_t> mask{1, 0, 1};
  const std::vector<double> scale{0.125, -3};
  const std::vector<Half> q{1, 2, 3};
  const std::vector<Array> arrays{array_of("mask", DType::boolean, {3}, mask),
                                  array_of("layer.0/q", DType::fp16, {3, 1}, q),
                                  array_of("scale", DType::fp64, {2}, scale)};
  for (const std::string extension : {".npz", ".safetensors"}) {
    write_tensor_file(directory / ("all" + extension), arrays);
    const TensorFile file = read_tensor_file(directory / ("all" + extension));
    ASSERT_EQ(file.arrays.size(), 3U);
    ASSERT_NE(file.find("layer.0/q"), nullptr);
    EXPECT_EQ(values_of<std::uint8_t>(*file.find("mask")), mask);
    EXPECT_EQ(values_of<Half>(*file.find("layer.0/q")), q);
    EXPECT_EQ(values_of<double>(*file.find("scale")), scale);
    EXPECT_EQ(file.find("k"), nullptr);
    for (const Array& array : file.arrays)
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(array.bytes.data()) % item_size(array.dtype), 0U) << array.name;
  }
}

TEST(Files, strided_arrays_are_written_row_major) {
  const TemporaryDirectory directory;
  const std::vector<std::int32_t> memory{0, 1, 2, 3, 4, 5, 6, 7};
  Array array = array_of("a", DType::int32, {2, 3, 2}, memory);
  array.strides = {0, 1, 4};  // a broadcast axis, and columns apart
  for (const std::string extension : {".npy", ".npz", ".safetensors"}) {
    write_tensor_file(directory / ("a" + extension), std::span(&array, 1));
    const Array read = only(read_tensor_file(directory / ("a" + extension)));
    EXPECT_EQ(read.strides, (Dims{6, 2, 1}));
    EXPECT_EQ(values_of<std::int32_t>(read), (std::vector<std::int32_t>{0, 4, 1, 5, 2, 6, 0, 4, 1, 5, 2, 6}))
        << extension;
  }
}

TEST(Files, arrays_outlive_their_file_object_and_its_replacement) {
  const TemporaryDirectory directory;
  for (const std::string extension : {".npy", ".npz", ".safetensors"}) {
    const std::vector<float> first{1, 2, 3}, second{7, 8, 9};
    const Array a = array_of("a", DType::fp32, {3}, first), b = array_of("a", DType::fp32, {3}, second);
    write_tensor_file(directory / ("a" + extension), std::span(&a, 1));
    const Array read = only(read_tensor_file(directory / ("a" + extension)));
    write_tensor_file(directory / ("a" + extension), std::span(&b, 1));
    EXPECT_EQ(values_of<float>(read), first);
    EXPECT_EQ(values_of<float>(only(read_tensor_file(directory / ("a" + extension)))), second);
  }
  EXPECT_EQ(directory.files(), 3U) << "a temporary file was left";
}

TEST(Files, equal_arrays_make_equal_files) {
  const TemporaryDirectory directory;
  const std::vector<float> values{1, 2};
  const Array array = array_of("a", DType::fp32, {2}, values);
  for (const std::string extension : {".npy", ".npz", ".safetensors"}) {
    write_tensor_file(directory / ("one" + extension), std::span(&array, 1));
    write_tensor_file(directory / ("two" + extension), std::span(&array, 1));
    EXPECT_EQ(load(directory / ("one" + extension)), load(directory / ("two" + extension))) << extension;
  }
}

TEST(Files, npy_header_is_numpys) {
  const std::vector<float> values{-2, -0.5, 1, 2.5, 4, 5.5};
  const TemporaryDirectory directory;
  const Array array = array_of("fp32", DType::fp32, {2, 3}, values);
  write_tensor_file(directory / "fp32.npy", std::span(&array, 1));
  const std::string ours = load(directory / "fp32.npy");
  EXPECT_EQ(ours.size(), 128U + 24U);
  EXPECT_EQ(ours, load(data_file("fp32.npy")));
}

// NumPy's files hold arange * 1.5 - 2, cast to the dtype (tests/tools/make_data.py).
TEST(NumpyFiles, every_dtype) {
  const auto read = [](const char* name) { return only(read_tensor_file(data_file(name))); };
  EXPECT_EQ(values_of<Half>(read("fp16.npy")), (std::vector<Half>{0xC000, 0xB800, 0x3C00, 0x4100, 0x4400, 0x4580}));
  EXPECT_EQ(values_of<float>(read("fp32.npy")), (std::vector<float>{-2, -0.5, 1, 2.5, 4, 5.5}));
  EXPECT_EQ(values_of<double>(read("fp64.npy")), (std::vector<double>{-2, -0.5, 1, 2.5, 4, 5.5}));
  EXPECT_EQ(values_of<std::int32_t>(read("int32.npy")), (std::vector<std::int32_t>{-2, 0, 1, 2, 4, 5}));
  EXPECT_EQ(values_of<std::int64_t>(read("int64.npy")), (std::vector<std::int64_t>{-2, 0, 1, 2, 4, 5}));
  EXPECT_EQ(values_of<std::uint8_t>(read("uint8.npy")), (std::vector<std::uint8_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(values_of<std::uint8_t>(read("boolean.npy")), (std::vector<std::uint8_t>{1, 0, 1, 0, 0, 1}));
  EXPECT_EQ(read("fp16.npy").dtype, DType::fp16);
  EXPECT_EQ(read("fp32.npy").name, "fp32");
  EXPECT_EQ(read("fp32.npy").shape, (Dims{2, 3}));
  EXPECT_EQ(read("boolean.npy").dtype, DType::boolean);
}

TEST(NumpyFiles, fortran_order_is_strides) {
  const Array array = only(read_tensor_file(data_file("fortran.npy")));
  EXPECT_EQ(array.shape, (Dims{2, 3}));
  EXPECT_EQ(array.strides, (Dims{1, 2}));
  EXPECT_EQ(values_of<float>(array), (std::vector<float>{-2, -0.5, 1, 2.5, 4, 5.5}));
}

TEST(NumpyFiles, scalar_empty_rank_5_and_versions_2_and_3) {
  const Array scalar = only(read_tensor_file(data_file("scalar.npy")));
  EXPECT_EQ(scalar.shape, Dims{});
  EXPECT_EQ(values_of<float>(scalar), std::vector<float>{7.25});
  const Array empty = only(read_tensor_file(data_file("empty.npy")));
  EXPECT_EQ(empty.shape, (Dims{2, 0, 3}));
  EXPECT_EQ(empty.bytes.size(), 0U);
  EXPECT_EQ(only(read_tensor_file(data_file("rank5.npy"))).shape, (Dims{1, 2, 1, 3, 1}));
  for (const char* name : {"version2.npy", "version3.npy"})
    EXPECT_EQ(values_of<float>(only(read_tensor_file(data_file(name)))), (std::vector<float>{-2, -0.5, 1, 2.5}))
        << name;
}

TEST(NumpyFiles, npz_stored_and_deflated) {
  for (const char* name : {"stored.npz", "deflated.npz"}) {
    SCOPED_TRACE(name);
    const TensorFile file = read_tensor_file(data_file(name));
    ASSERT_NE(file.find("q"), nullptr);
    EXPECT_EQ(values_of<float>(*file.find("q")), (std::vector<float>{-2, -0.5, 1, 2.5, 4, 5.5}));
    EXPECT_EQ(values_of<std::uint8_t>(*file.find("mask")), (std::vector<std::uint8_t>{1, 0}));
    EXPECT_EQ(values_of<std::int32_t>(*file.find("cu_seqlens_q")), (std::vector<std::int32_t>{-2, 0, 1}));
  }
  const TensorFile deflated = read_tensor_file(data_file("deflated.npz"));
  EXPECT_EQ(values_of<float>(*deflated.find("zeros")), std::vector<float>(4096, 0.0F));
}

TEST(NumpyFiles, npz_members_without_npy_in_their_names_and_without_members) {
  EXPECT_EQ(values_of<float>(*read_tensor_file(data_file("plain_name.npz")).find("q")),
            (std::vector<float>{-2, -0.5, 1, 2.5, 4, 5.5}));
  EXPECT_TRUE(read_tensor_file(data_file("no_members.npz")).arrays.empty());
}

TEST(SafetensorsFiles, as_the_library_writes_them) {
  const TensorFile file = read_tensor_file(data_file("library.safetensors"));
  EXPECT_EQ(file.metadata, (std::map<std::string, std::string>{{"source", "make_data.py"}}));
  ASSERT_EQ(file.arrays.size(), 3U);
  EXPECT_EQ(values_of<float>(*file.find("q")), (std::vector<float>{-2, -0.5, 1, 2.5, 4, 5.5}));
  EXPECT_EQ(file.find("q")->shape, (Dims{2, 3}));
  EXPECT_EQ(values_of<std::uint8_t>(*file.find("m")), (std::vector<std::uint8_t>{1, 0}));
  EXPECT_EQ(values_of<std::int64_t>(*file.find("n")), (std::vector<std::int64_t>{-2, 0}));
}

TEST(SafetensorsFiles, unaligned_tensors_are_copied_to_aligned_memory) {
  const std::string json = R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                           R"("q":{"dtype":"I32","shape":[2],"data_offsets":[1,9]}})";
  const std::string text = little(json.size(), 8) + json + std::string("\7\1\0\0\0\2\0\0\0", 9);
  for (std::size_t shift = 0; shift < 4; ++shift) {
    const std::string moved = std::string(shift, 'x') + text;
    const TensorFile file = parse_safetensors(source_of("a.safetensors", std::string_view(moved).substr(shift)));
    EXPECT_EQ(values_of<std::int32_t>(*file.find("q")), (std::vector<std::int32_t>{1, 2}));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(file.find("q")->bytes.data()) % 4, 0U);
  }
}

}  // namespace
}  // namespace narrows::files
