#include "cuda/compile.hpp"

#include "core/error.hpp"

#include <algorithm>
#include <charconv>
#include <chrono>

namespace narrows::cuda {
namespace {

/// --use_fast_math implies --fmad=true, which exact programs keep.
std::vector<std::string> flags(const Program& program) {
  return {"-default-device", "--std=c++20", "--ptxas-options=-v",
          program.exact_math ? "--fmad=true" : "--use_fast_math"};
}

/// 90 of "sm_90a".
int number_of(std::string_view architecture) {
  int number = 0;
  const std::string_view digits = architecture.starts_with("sm_") ? architecture.substr(3) : "";
  const auto [end, failure] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const std::string_view rest = digits.substr(static_cast<std::size_t>(end - digits.data()));
  if (failure != std::errc{} || (!rest.empty() && rest != "a" && rest != "f"))
    refuse_value("architecture", architecture, "sm_ and a number, as sm_80 or sm_90a");
  return number;
}

/// The compiler's option: the architecture itself or, of one it does not know, PTX of the newest before it.
std::string target(const Compiler& compiler, std::string_view architecture) {
  const int wanted = number_of(architecture);
  const std::vector<int>& known = compiler.architectures;
  const auto after = std::upper_bound(known.begin(), known.end(), wanted);
  if (after == known.begin())
    throw Error(ErrorCode::not_implemented,
                text("cuda: ", architecture, ": NVRTC ", compiler.version.text(), " (", compiler.path,
                     ") compiles for ", known.empty() ? "nothing" : text("sm_", known.front(), " and later")));
  if (after[-1] == wanted) return std::string(architecture);
  return "compute_" + std::to_string(after[-1]);
}

/// NVRTC's program, from making it to letting go.
class Compilation {
 public:
  Compilation(const Compiler& compiler, std::span<const SourceFile> files) : f_(compiler.functions) {
    std::vector<std::string> strings;  // with the zero at their ends
    for (const SourceFile& file : files) {
      strings.emplace_back(file.name);
      strings.emplace_back(file.text);
    }
    std::vector<const char*> names, texts;
    for (std::size_t i = 0; i < strings.size(); i += 2) {
      names.push_back(strings[i].c_str());
      texts.push_back(strings[i + 1].c_str());
    }
    check(f_.nvrtcCreateProgram(&program_, texts[0], names[0], static_cast<int>(files.size()) - 1, texts.data() + 1,
                                names.data() + 1));
  }
  ~Compilation() { f_.nvrtcDestroyProgram(&program_); }
  Compilation(const Compilation&) = delete;
  Compilation& operator=(const Compilation&) = delete;

  /// Whether the text was right; the log has what was not.
  bool run(const std::vector<std::string>& options) {
    std::vector<const char*> pointers;
    for (const std::string& option : options) pointers.push_back(option.c_str());
    constexpr NvrtcStatus kBadText = 6;
    const NvrtcStatus status = f_.nvrtcCompileProgram(program_, static_cast<int>(pointers.size()), pointers.data());
    if (status != kBadText) check(status);
    return status == 0;
  }
  std::string log() const {
    std::string text = fetch(f_.nvrtcGetProgramLogSize, f_.nvrtcGetProgramLog);
    while (!text.empty() && (text.back() == '\0' || text.back() == '\n')) text.pop_back();
    return text;
  }
  std::string cubin() const { return fetch(f_.nvrtcGetCUBINSize, f_.nvrtcGetCUBIN); }
  std::string ptx() const { return fetch(f_.nvrtcGetPTXSize, f_.nvrtcGetPTX); }

 private:
  template <class Size, class Get> std::string fetch(Size* size, Get* get) const {
    std::size_t bytes = 0;
    check(size(program_, &bytes));
    std::string result(bytes, '\0');
    check(get(program_, result.data()));
    return result;
  }
  void check(NvrtcStatus status) const {
    if (status != 0)
      throw Error(ErrorCode::internal, text("cuda: ", f_.nvrtcGetErrorString(status), " while compiling"));
  }

  const NvrtcFunctions& f_;
  NvrtcProgram program_ = nullptr;
};

}  // namespace

std::string architecture(int major, int minor) {
  return text("sm_", 10 * major + minor, major == 9 && minor == 0 ? "a" : "");
}

Digest content_key(const Program& program, std::string_view architecture, std::span<const SourceFile> sources) {
  Hash hash;
  hash.add_text("narrows program 1");
  hash.add_text(architecture);
  hash.add_text(program.function);
  for (const std::string& flag : flags(program)) hash.add_text(flag);
  for (const SourceFile& file : included_sources(program, sources)) {
    hash.add_text(file.name);
    hash.add_text(file.text);
  }
  return hash.finish();
}

Binary compile(const Compiler& compiler, const Program& program, std::string_view architecture,
               std::span<const SourceFile> sources) {
  const auto start = std::chrono::steady_clock::now();
  const std::string chosen = target(compiler, architecture);
  Binary binary;
  binary.is_ptx = chosen.starts_with("compute_");
  binary.function = program.function;
  binary.architecture = architecture;
  binary.compiler = compiler.version;
  Compilation compilation(compiler, included_sources(program, sources));
  std::vector<std::string> options = flags(program);
  options.push_back("--gpu-architecture=" + chosen);
  const bool is_right = compilation.run(options);
  binary.log = compilation.log();
  if (!is_right)
    throw Error(ErrorCode::internal, text("cuda: ", program.source, " does not compile for ", architecture,
                                          " with NVRTC ", compiler.version.text(), ":\n", binary.log));
  binary.image = binary.is_ptx ? compilation.ptx() : compilation.cubin();
  binary.usage = parse_usage(binary.log, program.function);
  binary.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return binary;
}

Binary compile(const Program& program, std::string_view architecture, std::span<const SourceFile> sources) {
  return compile(open_compiler(find_compiler()), program, architecture, sources);
}

}  // namespace narrows::cuda
