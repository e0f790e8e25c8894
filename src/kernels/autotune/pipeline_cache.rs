//! The driver's cache of compiled pipelines, kept on disk next to the kernel cache if the back end
//! lets a program keep it (Vulkan). Drivers that compile when a pipeline is made need not compile
//! again in the next run.

use std::path::{Path, PathBuf};
use std::{fs, io};

use super::cache;
use super::certify::{WGPU, hash_text};
use crate::Pipelines;
use crate::device::{DeviceError, Gpu};
use potluck_core::files;

/// The most bytes of a file. A larger one is removed, so that the next run begins a new one:
/// entries of kernels that no longer exist are never taken out.
const BYTES_MAX: usize = 64 << 20;

/// Bytes of the hash before the data.
const HASH_BYTES: usize = blake3::OUT_LEN;

/// File with the cache of one adapter and driver.
#[derive(Debug)]
pub(crate) struct PipelineCacheFile {
    path: PathBuf,
    /// Adapter, API and driver; see [`super::cache::device_key`].
    device: String,
    /// Hash of the content of the file, if it is a cache of this device.
    kept: Option<blake3::Hash>,
}

impl PipelineCacheFile {
    /// Gives `pipelines` the cache in a file, or an empty one if there is no file or if its content
    /// is damaged or from another device or release of wgpu; `None` if the back end has no cache
    /// that can be kept.
    pub fn open(gpu: &Gpu, pipelines: &mut Pipelines, path: &Path, device: &str) -> Option<Self> {
        if !gpu.device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return None;
        }
        let file = fs::read(path).unwrap_or_default();
        let (data, kept) = match content(&file, device) {
            Some((data, hash)) => (Some(data), Some(hash)),
            None => (None, None),
        };
        let (cache, kept) = match create(gpu, data) {
            Ok(cache) => (cache, kept),
            // The file of another card of the same name: a new one replaces it.
            Err(_) => (create(gpu, None).ok()?, None),
        };
        pipelines.set_driver_cache(cache);
        Some(Self { path: path.to_path_buf(), device: device.into(), kept })
    }

    /// Writes the cache if it has changed.
    ///
    /// # Errors
    /// Returns the error of writing; the file is as it was then.
    pub fn save(&mut self, pipelines: &Pipelines) -> io::Result<()> {
        let data = pipelines.driver_cache().and_then(wgpu::PipelineCache::get_data);
        let Some(data) = data else { return Ok(()) };
        if data.len() > BYTES_MAX {
            self.kept = None;
            return match fs::remove_file(&self.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            };
        }
        let hash = hash(&self.device, &data);
        if self.kept != Some(hash) {
            fs::create_dir_all(files::parent(&self.path))?;
            // Processes that begin together write one temporary file.
            let _lock = cache::lock(&files::beside(&self.path, ".lock"))?;
            files::replace(&self.path, &[&hash.as_bytes()[..], &data].concat())?;
            self.kept = Some(hash);
        }
        Ok(())
    }
}

/// Makes a cache with this content, or an empty one. The data must be checked by [`content`].
fn create(gpu: &Gpu, data: Option<&[u8]>) -> Result<wgpu::PipelineCache, DeviceError> {
    let descriptor = wgpu::PipelineCacheDescriptor { label: None, data, fallback: true };
    // SAFETY: the data comes from `PipelineCache::get_data` for an adapter of this name and driver,
    // as the hash shows. wgpu compares the ids of vendor and device and the driver's own
    // identifier, too, and refuses data of another adapter.
    gpu.scoped("the pipeline cache", || unsafe { gpu.device.create_pipeline_cache(&descriptor) })
}

/// Data of a file and their hash, if they belong to this device.
fn content<'a>(file: &'a [u8], device: &str) -> Option<(&'a [u8], blake3::Hash)> {
    let (written, data) = file.split_at_checked(HASH_BYTES)?;
    let hash = hash(device, data);
    if data.len() > BYTES_MAX || hash.as_bytes() != written {
        return None;
    }
    Some((data, hash))
}

fn hash(device: &str, data: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for part in ["pipelines 1", WGPU, device] {
        hash_text(&mut hasher, part);
    }
    hasher.update(data).finalize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::ShaderChecks;
    use crate::testing::adapters;
    use crate::{Dispatch, Operand, Shader};
    use potluck_graph::Precision;

    fn dispatch() -> Dispatch {
        let operands = vec![Operand::Input(0), Operand::Output(0)];
        let params = vec![0; 4];
        Dispatch { shader: Shader::new("sum", "columns"), operands, params, groups: [1, 1, 1] }
    }

    /// Returns the file after a run that compiles a pipeline, with the hash that it had at the
    /// beginning.
    fn run(gpu: &Gpu, path: &Path, device: &str) -> Option<PipelineCacheFile> {
        let mut pipelines = Pipelines::default();
        let mut file = PipelineCacheFile::open(gpu, &mut pipelines, path, device)?;
        let known = file.kept;
        pipelines.get(gpu, &dispatch()).unwrap();
        file.save(&pipelines).unwrap();
        Some(PipelineCacheFile { kept: known, ..file })
    }

    #[test]
    fn what_drivers_compiled_is_read_again_unless_it_is_damaged_or_foreign() {
        for adapter in adapters() {
            let gpu = Gpu::open(&adapter, ShaderChecks::Disabled, Precision::F32).unwrap();
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("new").join("pipelines.bin");
            let Some(first) = run(&gpu, &path, "a device") else {
                assert_ne!(adapter.api, "vulkan", "{}", adapter.name);
                continue;
            };
            assert_eq!(first.kept, None, "{}", adapter.name);
            let written = fs::read(&path).unwrap();
            println!("{}: {} bytes", adapter.name, written.len());
            assert!(run(&gpu, &path, "a device").unwrap().kept.is_some(), "{}", adapter.name);
            assert!(run(&gpu, &path, "another device").unwrap().kept.is_none());
            for spoiled in [0, HASH_BYTES, written.len() - 1] {
                let mut damaged = written.clone();
                damaged[spoiled] ^= 1;
                for file in [&damaged[..], &written[..spoiled]] {
                    fs::write(&path, file).unwrap();
                    let opened = run(&gpu, &path, "a device").unwrap();
                    assert!(opened.kept.is_none(), "{} at {spoiled}", adapter.name);
                    // A valid one replaces it.
                    assert!(run(&gpu, &path, "a device").unwrap().kept.is_some());
                }
            }
        }
    }

    #[test]
    fn a_file_of_another_device_or_too_large_a_one_is_not_read() {
        let data = vec![0; 100];
        let file = [&hash("a", &data).as_bytes()[..], &data].concat();
        assert!(content(&file, "a").is_some() && content(&file, "b").is_none());
        let large = vec![0; BYTES_MAX + 1];
        let file = [&hash("a", &large).as_bytes()[..], &large].concat();
        assert!(content(&file, "a").is_none());
    }
}
