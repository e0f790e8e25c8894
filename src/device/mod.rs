//! Devices: the adapters of the machine, found, merged, selected and opened, with buffers,
//! transfers and faults as values. The only rooms that know wgpu are this one, `kernels` (its
//! pipelines) and `exec`.

pub mod adapters;
pub mod error;
pub mod gpu;
pub mod select;
pub mod staging;

pub use adapters::{Adapter, AdapterKind, list_adapters};
pub use error::{DeviceError, driver_hint};
pub use gpu::{Checks, Gpu, Limits};
pub use select::{Selection, select};
pub use staging::{ReadbackRing, UploadRing};
