//! AMD's Vulkan driver of Mesa for a GPU that is not there: compiles pipelines and reports the
//! compiler's statistics; nothing is executed. Mesa up to version 25 makes such a device if
//! `RADV_FORCE_FAMILY` names one.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};

use ash::khr::pipeline_executable_properties as executables;
use ash::{Device, Entry, Instance, vk};

/// Storage buffers of a kernel, at most, and bytes of its immediates.
const BINDINGS: u32 = 16;
const IMMEDIATE_BYTES: u32 = 128;

/// What the compiler says of a kernel.
pub struct Report {
    /// Figures by the names that the driver gives them, in lower case.
    pub figures: BTreeMap<String, u64>,
    pub assembly: String,
}

/// A device of the driver, which compiles only.
pub struct Compiler {
    // Keeps the loader's library open.
    _entry: Entry,
    _instance: Instance,
    device: Device,
    executables: executables::Device,
    layout: vk::PipelineLayout,
    /// Name of the device.
    pub name: String,
    /// Identity of the driver's build and of the device: another one may compile otherwise.
    pub build: [u8; vk::UUID_SIZE],
}

fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|one| *one as u8).take_while(|one| *one != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Compiler {
    /// Opens the driver's device; the error says why there is none.
    pub fn open() -> Result<Self, String> {
        // SAFETY: Vulkan is called as its specification requires: with structures that live until
        // the call returns, objects of this device, and features that are asked for at its
        // creation. What is created lives until the process ends.
        unsafe {
            let entry = Entry::load().map_err(|why| why.to_string())?;
            let app = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_3);
            let create = vk::InstanceCreateInfo::default().application_info(&app);
            let instance = entry.create_instance(&create, None).map_err(|why| why.to_string())?;
            let found = instance.enumerate_physical_devices().map_err(|why| why.to_string())?;
            let physical = *found.first().ok_or("the driver shows no device")?;
            let properties = instance.get_physical_device_properties(physical);
            let (name, build) = (text(&properties.device_name), properties.pipeline_cache_uuid);
            let device = device(&instance, physical).map_err(|why| format!("{name}: {why}"))?;
            let executables = executables::Device::new(&instance, &device);
            let layout = layout(&device).map_err(|why| why.to_string())?;
            Ok(Self {
                _entry: entry,
                _instance: instance,
                device,
                executables,
                layout,
                name,
                build,
            })
        }
    }

    /// Compiles an entry point of a module in SPIR-V.
    pub fn compile(&self, words: &[u32], entry_point: &str) -> Result<Report, String> {
        let entry_point = CString::new(entry_point).map_err(|why| why.to_string())?;
        self.pipeline(words, &entry_point).map_err(|why| why.to_string())
    }

    fn pipeline(&self, words: &[u32], entry_point: &CStr) -> Result<Report, vk::Result> {
        let flags = vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR
            | vk::PipelineCreateFlags::CAPTURE_INTERNAL_REPRESENTATIONS_KHR;
        // SAFETY: as in `open`.
        unsafe {
            let create = vk::ShaderModuleCreateInfo::default().code(words);
            let module = self.device.create_shader_module(&create, None)?;
            let stage = vk::PipelineShaderStageCreateInfo::default()
                .stage(vk::ShaderStageFlags::COMPUTE)
                .module(module)
                .name(entry_point);
            let create = vk::ComputePipelineCreateInfo::default()
                .flags(flags)
                .stage(stage)
                .layout(self.layout);
            let made =
                self.device.create_compute_pipelines(vk::PipelineCache::null(), &[create], None);
            self.device.destroy_shader_module(module, None);
            let pipeline = made.map_err(|(_, why)| why)?[0];
            let report = self.report(pipeline);
            self.device.destroy_pipeline(pipeline, None);
            report
        }
    }

    fn report(&self, pipeline: vk::Pipeline) -> Result<Report, vk::Result> {
        let executable = vk::PipelineExecutableInfoKHR::default().pipeline(pipeline);
        // SAFETY: as in `open`; the pipeline was made with both kinds of captures.
        let figures = unsafe { self.executables.get_pipeline_executable_statistics(&executable)? };
        let figure = |one: &vk::PipelineExecutableStatisticKHR| {
            // SAFETY: this driver gives all figures as 64 bits; a double or a bool has as many.
            (text(&one.name).to_lowercase(), unsafe { one.value.u64 })
        };
        let assembly = self.assembly(&executable)?;
        Ok(Report { figures: figures.iter().map(figure).collect(), assembly })
    }

    fn assembly(&self, executable: &vk::PipelineExecutableInfoKHR) -> Result<String, vk::Result> {
        let ask = self.executables.fp().get_pipeline_executable_internal_representations_khr;
        // SAFETY: as in `open`. Asked twice: for the sizes, then for the texts, whose buffers live
        // until they were read.
        unsafe {
            let mut found =
                self.executables.get_pipeline_executable_internal_representations(executable)?;
            let mut texts: Vec<Vec<u8>> = found.iter().map(|one| vec![0; one.data_size]).collect();
            for (one, text) in found.iter_mut().zip(&mut texts) {
                one.p_data = text.as_mut_ptr().cast();
            }
            let mut count = found.len() as u32;
            ask(self.device.handle(), executable, &mut count, found.as_mut_ptr()).result()?;
            let named = found.iter().zip(&texts).find(|(one, _)| text(&one.name) == "Assembly");
            let bytes = named.map(|(_, bytes)| bytes.as_slice()).unwrap_or_default();
            Ok(String::from_utf8_lossy(bytes).trim_end_matches('\0').to_string())
        }
    }
}

/// Creates a device with robust buffer access, as wgpu does wherever it exists.
///
/// # Safety
/// `physical` must be one of the instance's devices.
unsafe fn device(instance: &Instance, physical: vk::PhysicalDevice) -> Result<Device, vk::Result> {
    let queues = [vk::DeviceQueueCreateInfo::default().queue_priorities(&[1.0])];
    let mut statistics = vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR::default()
        .pipeline_executable_info(true);
    let mut robust =
        vk::PhysicalDeviceRobustness2FeaturesEXT::default().robust_buffer_access2(true);
    let features = vk::PhysicalDeviceFeatures::default().robust_buffer_access(true);
    let mut memory_model = vk::PhysicalDeviceVulkan12Features::default()
        .vulkan_memory_model(true)
        .vulkan_memory_model_device_scope(true);
    let mut v13 = vk::PhysicalDeviceVulkan13Features::default()
        .shader_zero_initialize_workgroup_memory(true)
        .maintenance4(true);
    let extensions = [executables::NAME.as_ptr(), ash::ext::robustness2::NAME.as_ptr()];
    let create = vk::DeviceCreateInfo::default()
        .queue_create_infos(&queues)
        .enabled_extension_names(&extensions)
        .enabled_features(&features)
        .push_next(&mut robust)
        .push_next(&mut statistics)
        .push_next(&mut memory_model)
        .push_next(&mut v13);
    // SAFETY: the caller vouches for `physical`.
    unsafe { instance.create_device(physical, &create, None) }
}

/// Creates a layout that fits every kernel: storage buffers from binding 0 on, and immediates.
///
/// # Safety
/// `device` must be alive.
unsafe fn layout(device: &Device) -> Result<vk::PipelineLayout, vk::Result> {
    let binding = |binding| {
        vk::DescriptorSetLayoutBinding::default()
            .binding(binding)
            .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
            .descriptor_count(1)
            .stage_flags(vk::ShaderStageFlags::COMPUTE)
    };
    let bindings: Vec<_> = (0..BINDINGS).map(binding).collect();
    let create = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
    let stages = vk::ShaderStageFlags::COMPUTE;
    let ranges = [vk::PushConstantRange::default().stage_flags(stages).size(IMMEDIATE_BYTES)];
    // SAFETY: the caller vouches for `device`.
    unsafe {
        let sets = [device.create_descriptor_set_layout(&create, None)?];
        let create = vk::PipelineLayoutCreateInfo::default()
            .set_layouts(&sets)
            .push_constant_ranges(&ranges);
        device.create_pipeline_layout(&create, None)
    }
}
