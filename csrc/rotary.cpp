#include "rotary.h"

#include "layout.h"

namespace moestro {
namespace {

// One operand of each product for all heads of a token at once, so that few calls round them.
class Turn : public Workspace<Turn> {
public:
    Turn(const Isa& isa, const Rotary& r, int64_t num_heads, int64_t head_size, Element dtype)
        : isa_(isa), r_(r), num_heads_(num_heads), head_size_(head_size), half_(r.columns / 2), dtype_(dtype) {
        const int64_t all = round_up(num_heads * head_size, 16), products = round_up(num_heads * half_, 16);
        wide_ = scratch().reserve(all + 5 * products + 2 * round_up(r.second + half_, 16));
        for (int64_t i = 0; i < 4; ++i) product_[i] = wide_ + all + i * products;
        room_ = wide_ + all + 4 * products;
        cos_ = room_ + products, sin_ = cos_ + round_up(r.second + half_, 16);
    }

    void operator()(int64_t token, void* heads) const {
        isa_.widen(heads, dtype_, num_heads_ * head_size_, 1.0f, wide_);
        angles(r_.cos, token, cos_);
        angles(r_.sin, token, sin_);
        multiply();
        for (float* product : product_) round(product);
        for (int64_t head = 0; head < num_heads_; ++head)
            for (int64_t i = 0; i < half_; ++i) {
                float* x = wide_ + head * head_size_;
                const int64_t at = head * half_ + i;
                x[i] = product_[0][at] - product_[1][at];
                x[i + half_] = product_[2][at] + product_[3][at];
            }
        write(wide_, num_heads_ * head_size_, heads);
    }

private:
    void multiply() const {
        for (int64_t head = 0; head < num_heads_; ++head) {
            const float *first = wide_ + head * head_size_, *second = first + half_;
            for (int64_t i = 0; i < half_; ++i) {
                const int64_t at = head * half_ + i;
                product_[0][at] = first[i] * cos_[i];
                product_[1][at] = second[i] * sin_[i];
                product_[2][at] = second[i] * cos_[i + r_.second];
                product_[3][at] = first[i] * sin_[i + r_.second];
            }
        }
    }
    void angles(const void* rows, int64_t token, float* to) const {
        const auto* from = static_cast<const uint8_t*>(rows) + bytes_of(dtype_, token * r_.stride);
        isa_.widen(from, dtype_, r_.second + half_, 1.0f, to);
    }
    void round(float* values) const {
        if (dtype_ == Element::f32) return;
        write(values, num_heads_ * half_, room_);
        isa_.widen(room_, dtype_, num_heads_ * half_, 1.0f, values);
    }
    void write(const float* from, int64_t n, void* to) const {
        const float one = 1.0f;
        isa_.combine(&from, &one, 1, n, to, dtype_);
    }

    const Isa& isa_;
    const Rotary& r_;
    const int64_t num_heads_, head_size_, half_;
    const Element dtype_;
    float *wide_, *product_[4], *room_, *cos_, *sin_;
};

}  // namespace

void rotate(const Isa& isa, const Rotary& rotary, int64_t token, void* heads, int64_t num_heads, int64_t head_size,
            Element dtype) {
    Turn(isa, rotary, num_heads, head_size, dtype)(token, heads);
}

}  // namespace moestro
