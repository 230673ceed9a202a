// .npy and .safetensors files that are not as they should be, and what is said about them.
#include <functional>

#include "tests/fuzz/check_file.hpp"
#include "tests/tools/files_support.hpp"
#include "tools/files/npy.hpp"
#include "tools/files/npz.hpp"
#include "tools/files/safetensors.hpp"

namespace narrows::files {
namespace {

struct Case {
  std::string content;
  std::string text;
};

std::string npy(std::string_view dict, std::string_view data) {
  return "\x93NUMPY" + std::string("\1\0", 2) + little(dict.size(), 2) + std::string(dict) + std::string(data);
}

std::string npy_with(std::string_view descr, std::string_view shape, std::size_t data) {
  const std::string dict =
      "{'descr': " + std::string(descr) + ", 'fortran_order': False, 'shape': " + std::string(shape) + "}\n";
  return npy(dict, std::string(data, '\0'));
}

std::string npy_error(const std::string& content) {
  return error_of([&] { parse_npy(source_of("a.npy", content)); });
}

std::string safetensors(std::string_view json, std::size_t data = 0) {
  return little(json.size(), 8) + std::string(json) + std::string(data, '\0');
}

std::string safetensors_error(const std::string& content) {
  return error_of([&] { parse_safetensors(source_of("m.safetensors", content)); });
}

/// A tensor entry of a safetensors header.
std::string entry(std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return R"({"dtype":)" + std::string(dtype) + R"(,"shape":)" + std::string(shape) + R"(,"data_offsets":)" +
         std::string(offsets) + "}";
}

std::string with_q(const std::string& description) { return R"({"q":)" + description + "}"; }

TEST(HostileNpy, truncated_at_every_byte_is_refused) {
  const std::string whole = load(data_file("fp32.npy"));
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_NE(npy_error(whole.substr(0, size)), "") << "cut to " << size << " bytes";
  EXPECT_EQ(npy_error(whole), "");
}

TEST(HostileNpy, header_fields) {
  const std::string magic = "\x93NUMPY";
  const std::vector<Case> cases{
      {"GARBAGE GARBAGE", "a.npy: not .npy data: it does not begin with \\x93NUMPY"},
      {magic, "a.npy: ends after 6 bytes, within the version"},
      {magic + std::string("\4\0\0\0\0\0", 6), "a.npy: .npy version 4.0 is not read; 1.0, 2.0 and 3.0 are"},
      {magic + std::string("\1\7\0\0", 4), "a.npy: .npy version 1.7 is not read; 1.0, 2.0 and 3.0 are"},
      {magic + std::string("\2\0\1\0", 4), "a.npy: ends after 10 bytes, within the header's length"},
      {magic + std::string("\1\0\xFF\xFF", 4) + "{}", "a.npy: the file has 12 bytes; its header alone has 65545"},
      {magic + std::string("\2\0\xFF\xFF\xFF\xFF", 6), "a.npy: header of 4294967295 bytes; at most 65536 are read"}};
  for (const Case& c : cases) EXPECT_EQ(npy_error(c.content), c.text);
}

TEST(HostileNpy, dict_grammar) {
  const std::vector<Case> cases{
      {"", "a.npy: header byte 0: expected '{', found the end"},
      {"__import__('os')", "a.npy: header byte 0: expected '{', found '_'"},
      {"{'descr' '<f4'}", "a.npy: header byte 9: expected ':', found '''"},
      {"{'descr': '<f4' 'shape': ()}", "a.npy: header byte 16: expected '}', found '''"},
      {"{'descr': '<f4", "a.npy: header byte 10: expected a string that ends, found '''"},
      {"{'descr': '<f\\x34'}", "a.npy: header byte 10: expected a string without escapes, found '''"},
      {"{'shape': (3)}", "a.npy: header byte 12: expected ',' after the only size of a tuple, found ')'"},
      {"{'shape': (3 4)}", "a.npy: header byte 13: expected ',' after the only size of a tuple, found '4'"},
      {"{'shape': (3, -4)}", "a.npy: header byte 14: expected a size, found '-'"},
      {"{'shape': (3, 04)}", "a.npy: header byte 14: expected a size without leading zeros, found '0'"},
      {"{'shape': (3, 99999999999999999999)}", "a.npy: shape: size '99999999999999999999' leaves 63 bits"},
      {"{'shape': (1, 1, 1, 1, 1, 1)}", "a.npy: shape has 6 dimensions; at most 5 are read"},
      {"{'fortran_order': 1}", "a.npy: header byte 18: expected True or False, found '1'"},
      {"{'shape': (), 'shape': ()}", "a.npy: header key 'shape' is given twice"},
      {"{'evil\x1b[2J': 1}", "a.npy: header key 'evil\\x1b[2J' is not one of 'descr', 'fortran_order', 'shape'"},
      {"{}", "a.npy: header without the key 'descr'"},
      {"{'descr': '<f4', }", "a.npy: header without the key 'fortran_order'"},
      {"{'descr': '<f4', 'fortran_order': False}", "a.npy: header without the key 'shape'"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': ()} x",
       "a.npy: header byte 54: expected the end, found 'x'"}};
  for (const Case& c : cases) EXPECT_EQ(npy_error(npy(c.content, "")), c.text);
}

TEST(HostileNpy, a_nul_byte_does_not_end_the_header) {
  const std::string dict("{'descr': '<f4', 'fortran_order': False, 'shape': ()}\0{", 55);
  EXPECT_EQ(npy_error(npy(dict, "1234")), "a.npy: header byte 53: expected the end, found '\\x00'");
}

TEST(HostileNpy, descr) {
  const std::string read = " is not read; '<f2' '<f4' '<f8' '<i4' '<i8' '|u1' '|b1' are";
  const std::vector<Case> cases{
      {"'>f4'", "a.npy: descr '>f4' is big-endian; only little-endian data is read"},
      {"'|O'", "a.npy: descr '|O'" + read},
      {"'<c8'", "a.npy: descr '<c8'" + read},
      {"''", "a.npy: descr ''" + read},
      {"[('x', '<f4')]", "a.npy: descr is a list of fields; only arrays of one number type are read"},
      {"'|V2'", "a.npy: descr '|V2' is two bytes without a type (NumPy has no bfloat16); store bf16 as .safetensors"},
      {"'<V2'", "a.npy: descr '<V2' is two bytes without a type (NumPy has no bfloat16); store bf16 as .safetensors"}};
  for (const Case& c : cases) EXPECT_EQ(npy_error(npy_with(c.content, "(1,)", 4)), c.text);
  EXPECT_EQ(error_of([] { read_tensor_file(data_file("big_endian.npy")); }),
            data_file("big_endian.npy").string() + ": descr '>f4' is big-endian; only little-endian data is read");
}

TEST(HostileNpy, sizes) {
  EXPECT_EQ(npy_error(npy_with("'<f4'", "(2, 3)", 23)),
            "a.npy: 23 bytes follow the header; shape [2, 3] of <f4 needs 24");
  EXPECT_EQ(npy_error(npy_with("'<f4'", "(2, 3)", 25)),
            "a.npy: 25 bytes follow the header; shape [2, 3] of <f4 needs 24");
  EXPECT_EQ(npy_error(npy_with("'<f4'", "(1152921504606846976,)", 8)),
            "a.npy: 8 bytes follow the header; shape [1152921504606846976] of <f4 needs 4611686018427387904");
  EXPECT_EQ(npy_error(npy_with("'<f4'", "(4611686018427387904, 4)", 0)),
            "a.npy: shape [4611686018427387904, 4] of 4-byte items leaves 63 bits");
  EXPECT_EQ(npy_error(npy_with("'<f4'", "(0, 4611686018427387904, 4)", 0)),
            "a.npy: shape [0, 4611686018427387904, 4] of 4-byte items leaves 63 bits");
}

TEST(HostileNpy, booleans_are_0_or_1) {
  EXPECT_EQ(npy_error(npy("{'descr': '|b1', 'fortran_order': False, 'shape': (3,)}", "\1\1\7")),
            "a.npy: element 2 is 7; a boolean is stored as 0 or 1");
}

TEST(HostileSafetensors, truncated_at_every_byte_is_refused) {
  const std::string whole = load(data_file("library.safetensors"));
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_NE(safetensors_error(whole.substr(0, size)), "") << "cut to " << size << " bytes";
  EXPECT_EQ(safetensors_error(whole), "");
}

TEST(HostileSafetensors, header) {
  const std::vector<Case> cases{
      {"1234567", "m.safetensors: the file has 7 bytes; the header's length alone has 8"},
      {little(UINT64_MAX, 8) + "{}", "m.safetensors: header of 18446744073709551615 bytes; at most 100000000 are read"},
      {little(3, 8) + "{}", "m.safetensors: header of 3 bytes; 2 follow its length"},
      {little(0, 8) + "{}", "m.safetensors: not .safetensors data: the header does not begin with '{'"},
      {safetensors("[]"), "m.safetensors: not .safetensors data: the header does not begin with '{'"},
      {safetensors("{"), "m.safetensors: header is not valid JSON at its byte 1"},
      {safetensors("{} x"), "m.safetensors: header is not valid JSON at its byte 3"},
      {safetensors("{\"\xFF\":1}"), "m.safetensors: header is not valid JSON at its byte 2"},
      {safetensors(R"({"__metadata__":{"a":1}})"), "m.safetensors: metadata 'a' is a number; it is a string"},
      {safetensors(R"({"__metadata__":{"a":"1","a":"2"}})"), "m.safetensors: metadata key 'a' is given twice"},
      {safetensors(R"({"__metadata__":[]})"),
       "m.safetensors: tensor '__metadata__': is an array; an object describes it"},
      {safetensors(R"({"q":null})"), "m.safetensors: tensor 'q': is null; an object describes it"},
      {safetensors("{\"q\":" + std::string(90000, '[')),
       "m.safetensors: tensor 'q': is an array; an object describes it"},
      {safetensors(R"({"":{}})"), "m.safetensors: tensor without a name; a name has at least one character"},
      {safetensors(R"({"a\u0000b":{}})"),
       "m.safetensors: tensor 'a\\x00b': the name holds a control character; names are printable text"}};
  for (const Case& c : cases) EXPECT_EQ(safetensors_error(c.content), c.text);
  EXPECT_EQ(safetensors_error(safetensors("{}   ")), "") << "spaces may pad the header";
}

TEST(HostileSafetensors, description_of_a_tensor) {
  const std::string f32 = R"("F32")", q = "m.safetensors: tensor 'q': ";
  const std::vector<Case> cases{
      {entry(f32, "[2, 5]", "[0, 99]"), q + "data_offsets [0, 99] hold 99 bytes; shape [2, 5] of F32 needs 40"},
      {entry(f32, "[2, 5]", "[8, 0]"), q + "data_offsets [8, 0] end before they begin"},
      {entry(f32, "[2, 5]", "[0]"), q + "data_offsets has 1 numbers; it is [begin, end]"},
      {entry(f32, "[2, 5]", "[0, 40, 80]"), q + "data_offsets has 3 numbers; it is [begin, end]"},
      {entry(f32, "[2, 5]", "[-1, 40]"),
       q + "data_offsets holds the negative number -1; it holds whole numbers from 0"},
      {entry(f32, "[2.5]", "[0, 40]"), q + "shape holds the number '2.5'; it holds whole numbers from 0"},
      {entry(f32, "[99999999999999999999]", "[0, 4]"),
       q + "shape holds the number '99999999999999999999'; it holds whole numbers from 0"},
      {entry(f32, "[9223372036854775808]", "[0, 4]"), q + "shape: size 9223372036854775808 leaves 63 bits"},
      {entry(f32, "[4294967296, 4294967296]", "[0, 0]"),
       q + "shape [4294967296, 4294967296] of 4-byte items leaves 63 bits"},
      {entry(f32, "[1152921504606846976]", "[0, 40]"),
       q + "data_offsets [0, 40] hold 40 bytes; shape [1152921504606846976] of F32 needs 4611686018427387904"},
      {entry(f32, "[1,1,1,1,1,1]", "[0, 4]"), q + "shape has 6 dimensions; at most 5 are read"},
      {entry(f32, "[[1]]", "[0, 4]"), q + "shape holds an array; it holds whole numbers from 0"},
      {entry(f32, "3", "[0, 4]"), q + "shape is a number; it is an array"},
      {entry("4", "[1]", "[0, 4]"), q + "dtype is a number; it is a string"},
      {entry(R"("F8_E4M3")", "[1]", "[0, 1]"), q + "dtype 'F8_E4M3' is not read; F16 BF16 F32 F64 I32 I64 U8 BOOL are"},
      {R"({"dtype":"F32","dtype":"F32"})", q + "dtype is given twice"},
      {R"({"shape":[],"shape":[]})", q + "shape is given twice"},
      {R"({"strides":[1]})", q + "key 'strides' is not one of 'dtype', 'shape', 'data_offsets'"},
      {R"({"shape":[],"data_offsets":[0,4]})", q + "no dtype"},
      {R"({"dtype":"F32","data_offsets":[0,4]})", q + "no shape"},
      {R"({"dtype":"F32","shape":[]})", q + "no data_offsets"},
      {entry(R"("BOOL")", "[1]", "[0, 1]"), ""},
      {entry(f32, "[10]", "[0, 40]"), q + "data_offsets [0, 40] end beyond the 1 bytes of data"},
      {entry(f32, "[1]", "[18446744073709551612, 18446744073709551615]"),
       q + "data_offsets [18446744073709551612, 18446744073709551615] hold 3 bytes; shape [1] of F32 needs 4"}};
  for (const Case& c : cases) EXPECT_EQ(safetensors_error(safetensors(with_q(c.content), 1)), c.text);
}

TEST(HostileSafetensors, every_byte_belongs_to_one_tensor) {
  const auto two = [](std::string_view first, std::string_view second) {
    return R"({"q":)" + entry(R"("U8")", "[4]", first) + R"(,"k":)" + entry(R"("U8")", "[4]", second) + "}";
  };
  EXPECT_EQ(safetensors_error(safetensors(two("[0, 4]", "[4, 8]"), 8)), "");
  EXPECT_EQ(safetensors_error(safetensors(two("[4, 8]", "[0, 4]"), 8)), "");
  EXPECT_EQ(safetensors_error(safetensors(two("[0, 4]", "[2, 6]"), 6)),
            "m.safetensors: tensor 'k': data_offsets [2, 6] overlap those of tensor 'q', [0, 4]");
  EXPECT_EQ(safetensors_error(safetensors(two("[0, 4]", "[5, 9]"), 9)),
            "m.safetensors: tensor 'k': data_offsets [5, 9] leave a gap: bytes [4, 5] belong to no tensor");
  EXPECT_EQ(safetensors_error(safetensors(two("[0, 4]", "[4, 8]"), 9)),
            "m.safetensors: data bytes [8, 9] belong to no tensor");
  EXPECT_EQ(safetensors_error(safetensors("{}", 1)), "m.safetensors: data bytes [0, 1] belong to no tensor");
  const std::string u8 = entry(R"("U8")", "[1]", "[0, 1]");
  EXPECT_EQ(safetensors_error(safetensors(R"({"q":)" + u8 + R"(,"q":)" + u8 + "}", 1)),
            "m.safetensors: tensor 'q': the name is given twice");
}

TEST(SeedCorpus, every_seed_is_read_or_refused_by_name) {
  const std::filesystem::path corpus = std::filesystem::path(__FILE__).parent_path().parent_path() / "fuzz" / "corpus";
  const auto replay = [&](const char* directory, const std::function<TensorFile(const Source&)>& parse) {
    std::size_t read = 0, refused = 0;
    for (const auto& seed : std::filesystem::directory_iterator(corpus / directory)) {
      const std::string content = load(seed.path());
      const bool fails =
          !error_of([&] { check_file(parse(source_of(seed.path().filename().string(), content))); }).empty();
      ++(fails ? refused : read);
    }
    EXPECT_GE(read, 4U) << directory;
    EXPECT_GE(refused, 1U) << directory;
  };
  replay("npy_fuzzer", parse_npy);
  replay("npz_fuzzer", [](const Source& source) { return parse_npz(source, std::uint64_t{1} << 24U); });
  replay("safetensors_fuzzer", parse_safetensors);
}

}  // namespace
}  // namespace narrows::files
