#include "testing/device/device_problem.h"

namespace moegemm::testing {
namespace {

std::vector<unsigned char> encode_indices(DType dtype, const std::vector<std::int64_t>& values) {
  std::vector<unsigned char> bytes(values.size() * size_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    encode_index(dtype, bytes.data(), static_cast<std::int64_t>(i), values[i]);
  }
  return bytes;
}

std::vector<unsigned char> encode_weights(DType dtype, const std::vector<float>& values) {
  std::vector<unsigned char> bytes(values.size() * size_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    encode(dtype, bytes.data(), static_cast<std::int64_t>(i), values[i]);
  }
  return bytes;
}

/// As many bytes of poison in front.
std::vector<unsigned char> shifted(const std::vector<unsigned char>& bytes, std::int64_t skipped) {
  std::vector<unsigned char> all(static_cast<std::size_t>(skipped), kPoisonByte);
  all.insert(all.end(), bytes.begin(), bytes.end());
  return all;
}

void upload_bytes(Buffer& buffer, Memory& memory, const std::vector<unsigned char>& bytes) {
  if (buffer.data() == nullptr) buffer = Buffer(memory, bytes.size());
  buffer.upload(bytes.data());
}

}  // namespace

DeviceProblem::DeviceProblem(Memory& memory, const HostProblem& host)
    : memory_(memory), host_(host) {
  const ProblemCase& spec = host.spec;
  if (host.op != Op::kDx) x_ = upload(host.x);
  if (host.op != Op::kDw) {
    if (spec.quantised()) {
      upload_quantised(host.packed_w);
    } else {
      w_ = upload(host.w);
    }
    w_.view = TensorView::stack(w_.view.data, host.dtype, spec.experts(), spec.n, spec.k,
                                spec.quantised() ? spec.k : host.w.stride, memory.device());
  }
  if (host.op != Op::kForward) dy_ = upload(host.dy);
  if (spec.bias) bias_ = upload(host.bias);
  if (spec.low_rank > 0) {
    low_rows_ = upload(host.low_rows);
    low_weights_ = upload(host.low_weights);
    low_weights_.view = TensorView::stack(
        low_weights_.view.data, host.dtype, spec.experts(), host.low_weights.rows / spec.experts(),
        host.low_weights.cols, host.low_weights.stride, memory.device());
  }
  out_ = Buffer(memory, host.out.bytes.size(), true);
  out_view_ = view_of(host.out, out_.data());
  if (host.op == Op::kDw) {
    out_view_ = TensorView::stack(out_view_.data, host.out_dtype, spec.experts(), spec.n, spec.k,
                                  host.out.stride, memory.device());
  }
  reset_output();
  upload_routing(host);
  routing_.topk = spec.topk;
  routing_.m_sizes =
      TensorView::vector(sizes_.data(), spec.sizes_dtype, spec.experts(), memory.device());
  if (!spec.starts.empty()) {
    routing_.starts =
        TensorView::vector(starts_.data(), spec.sizes_dtype, spec.experts(), memory.device());
  }
  routing_.ends = spec.ends;
  routing_.tails = spec.tails;
  routing_.expected_rows = spec.expected_rows;
  if (spec.permuted()) {
    routing_.gather_indices =
        TensorView::vector(indices_.data(), spec.index_dtype, spec.rows, memory.device());
  }
  if (spec.multiply) {
    routing_.router_weights =
        TensorView::vector(weights_.data(), host.weights_dtype, spec.flat_rows(), memory.device());
  }
}

TensorView DeviceProblem::view_of(const HostMatrix& matrix, void* data) const {
  void* first = data == nullptr
                    ? nullptr
                    : static_cast<char*>(data) + matrix.offset * size_bytes(matrix.dtype);
  return TensorView::matrix(first, matrix.dtype, matrix.rows, matrix.cols, matrix.stride,
                            memory_.device());
}

DeviceTensor DeviceProblem::upload(const HostMatrix& matrix) {
  DeviceTensor tensor{Buffer(memory_, matrix.bytes.size()), {}};
  tensor.buffer.upload(matrix.bytes.data());
  tensor.view = view_of(matrix, tensor.buffer.data());
  return tensor;
}

/// Packed values and scales begin base_offset bytes and scales into their allocations.
void DeviceProblem::upload_quantised(const QuantisedWeights& weights) {
  const auto upload_after = [&](const std::vector<unsigned char>& bytes, std::int64_t skipped) {
    Buffer buffer(memory_, bytes.size() + skipped);
    const std::vector<unsigned char> all = shifted(bytes, skipped);
    buffer.upload(all.data());
    return buffer;
  };
  const std::int64_t skipped = host_.spec.base_offset;
  const std::int64_t skipped_scales = skipped * scale_bytes(weights.quantization.scale_type);
  w_.buffer = upload_after(weights.values, skipped);
  w_.view.data = static_cast<unsigned char*>(w_.buffer.data()) + skipped;
  scales_ = upload_after(weights.scales, skipped_scales);
  scales_view_ = weights.scales_view(static_cast<unsigned char*>(scales_.data()) + skipped_scales,
                                     memory_.device());
}

void DeviceProblem::reset_output() { out_.upload(host_.out.bytes.data()); }

void DeviceProblem::upload_routing(const HostProblem& host) {
  const ProblemCase& spec = host.spec;
  upload_bytes(sizes_, memory_, encode_indices(spec.sizes_dtype, spec.m_sizes));
  if (!spec.starts.empty()) {
    upload_bytes(starts_, memory_, encode_indices(spec.sizes_dtype, spec.starts));
  }
  if (spec.permuted()) {
    upload_bytes(indices_, memory_, encode_indices(spec.index_dtype, host.gather_indices));
  }
  if (spec.multiply) {
    upload_bytes(weights_, memory_, encode_weights(host.weights_dtype, host.router_weights));
  }
}

GemmOptions DeviceProblem::options() const {
  GemmOptions options;
  options.permute_x = host_.spec.permutation == Permutation::kX;
  options.permute_y = host_.spec.permutation == Permutation::kY;
  options.multiply = host_.spec.multiply;
  options.accumulate = host_.spec.accumulate;
  options.dy_per_token = host_.spec.dy_per_token;
  options.allow_tf32 = host_.spec.tf32;
  if (host_.spec.bias) options.bias = bias_.view;
  if (host_.spec.low_rank > 0) {
    options.low_rank_rows = low_rows_.view;
    options.low_rank_weights = low_weights_.view;
  }
  options.activation = host_.spec.activation;
  if (host_.spec.quantised()) {
    options.quantization = host_.packed_w.quantization;
    options.w_scales = scales_view_;
  }
  return options;
}

Plan DeviceProblem::call(const GemmOptions& options, const ExecutionContext& context) const {
  switch (host_.op) {
    case Op::kForward:
      return forward(x_.view, w_.view, out_view_, routing_, options, context);
    case Op::kDx:
      return backward_dx(dy_.view, w_.view, out_view_, routing_, options, context);
    case Op::kDw:
      break;
  }
  return backward_dw(dy_.view, x_.view, out_view_, routing_, options, context);
}

std::string DeviceProblem::trespass() const {
  if (!out_.guards_intact()) return "memory around the output was written to";
  if (x_.buffer.download() != host_.x.bytes) return "X was written to";
  if (host_.spec.quantised()) {
    const std::int64_t skipped = host_.spec.base_offset;
    const QuantisedWeights& weights = host_.packed_w;
    if (w_.buffer.download() != shifted(weights.values, skipped)) return "W was written to";
    if (scales_.download() !=
        shifted(weights.scales, skipped * scale_bytes(weights.quantization.scale_type))) {
      return "the scales of W were written to";
    }
  } else if (w_.buffer.download() != host_.w.bytes) {
    return "W was written to";
  }
  if (dy_.buffer.download() != host_.dy.bytes) return "dY was written to";
  if (bias_.buffer.download() != host_.bias.bytes) return "the bias was written to";
  if (low_rows_.buffer.download() != host_.low_rows.bytes)
    return "the low-rank rows were written to";
  if (low_weights_.buffer.download() != host_.low_weights.bytes) {
    return "the low-rank weights were written to";
  }
  return "";
}

}  // namespace moegemm::testing
