// A CUDA device that does nothing, for PyTorch's C++ side: its autograd engine asks for the current
// device and stream of every node, which a machine without a GPU cannot answer.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

constexpr DeviceIndex DEVICES = 64;
thread_local DeviceIndex current = 0;
thread_local StreamId streams[DEVICES] = {};

DeviceIndex exchange(DeviceIndex next) {
  const DeviceIndex before = current;
  if (next >= 0) current = next;
  return before;
}

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return {DeviceType::CUDA, current}; }
  Device exchangeDevice(Device next) const override {
    return {DeviceType::CUDA, exchange(next.index())};
  }
  void setDevice(Device next) const override { exchange(next.index()); }
  void uncheckedSetDevice(Device next) const noexcept override { exchange(next.index()); }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  Stream getStream(Device device) const override { return stream(index_of(device)); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, {DeviceType::CUDA, index_of(device)});
  }
  Stream exchangeStream(Stream next) const override {
    const Stream before = stream(index_of(next.device()));
    streams[before.device_index()] = next.id();
    return before;
  }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}

 private:
  static Stream stream(DeviceIndex index) {
    return Stream(Stream::UNSAFE, {DeviceType::CUDA, index}, streams[index]);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  int getNumGPUs() const override { return DEVICES; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex next) const override { exchange(next); }
  DeviceIndex exchangeDevice(DeviceIndex next) const override { return exchange(next); }
  DeviceIndex maybeExchangeDevice(DeviceIndex next) const override { return exchange(next); }
  bool isPinnedPtr(const void*) const override { return false; }
  void deviceSynchronize(DeviceIndex) const override {}
};

}  // namespace

namespace at {
// Before those of a PyTorch that is built with CUDA, which would look for a GPU.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(
    CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, Hooks)
}  // namespace at

// Called once PyTorch is loaded: the last guard that is registered counts.
extern "C" void install_guard() {
  static c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new Guard());
}
