//! Devices: discovery, merging, selection and opening of the machine's adapters, with buffers,
//! transfers and faults as values. Only this module, `kernels` (its pipelines), `autotune` and
//! `exec` use wgpu.

pub(crate) mod adapter_kind;
pub mod adapters;
mod dxc;
pub mod error;
mod exit;
pub(crate) mod features;
pub mod gpu;
pub mod heartbeat;
pub mod host;
mod injected;
pub mod limits;
pub mod mapped_reads;
pub mod memory;
pub mod panics;
pub mod select;
pub mod staging;
pub(crate) mod timestamps;

pub use adapter_kind::AdapterKind;
pub use adapters::{Adapter, list_adapters};
pub use error::{DeviceError, no_adapter};
pub use exit::skip_exit_handlers;
pub use features::{CooperativeMatrix, CooperativeSquare, Features};
pub use gpu::{Gpu, ShaderChecks};
pub use heartbeat::Heartbeat;
pub use host::HostInfo;
pub use injected::INJECTED_HANG_MAX;
pub(crate) use injected::inject_on_host;
pub use limits::Limits;
pub use mapped_reads::{MappedReadRates, ReadMethod};
pub use memory::AdapterMemory;
pub use select::{
    RemoteDeviceInfo, Selection, missing_devices, select, select_all, selector_of, selector_without,
};
pub(crate) use staging::{Mapping, ReadbackRing, UploadRing};
pub(crate) use timestamps::Timestamps;
