//! Settings of the benchmark: models, devices, and which of them go together.

/// Model of a setting.
pub struct Model {
    pub name: &'static str,
    /// Arguments of `potluck train`.
    pub arguments: &'static str,
}

const GPT: Model = Model {
    name: "gpt",
    arguments: "--set model.width=128 --set model.layers=4 --set model.heads=4 \
                --set model.context=64 --batch 12 --set train.sample_tokens=0",
};
const GPT_WIDE: Model = Model {
    name: "gpt-wide",
    arguments: "--set model.width=256 --set model.layers=6 --set model.heads=8 \
                --set model.context=128 --batch 8 --set train.sample_tokens=0",
};
const GPT_SMALL: Model = Model {
    name: "gpt-small",
    arguments: "--set model.width=64 --set model.layers=2 --set model.heads=2 \
                --set model.context=32 --batch 32 --set train.sample_tokens=0",
};
const GPT_DEEP: Model = Model {
    name: "gpt-deep",
    arguments: "--set model.width=96 --set model.layers=10 --set model.heads=6 \
                --set model.context=48 --batch 10 --set train.sample_tokens=0",
};
const LLAMA: Model = Model {
    name: "llama",
    arguments: "--set model.kind=llama --set model.width=128 --set model.layers=4 \
                --set model.heads=4 --set model.context=64 --batch 16 \
                --set train.sample_tokens=0",
};
const LENET: Model =
    Model { name: "lenet", arguments: "--data pictures --set model.kind=cnn --batch 64" };

/// Devices of a setting.
pub struct Devices {
    pub name: &'static str,
    /// Selector of the devices of the first node.
    pub selector: &'static str,
    pub second: Option<SecondNode>,
}

/// Burst of a limit with which a message of tens of kilobytes waits for its own bytes, as on a
/// cable.
const BURST_US: u64 = 504;

/// Second node of a setting. Each of the two has a core of its own.
pub struct SecondNode {
    pub selector: &'static str,
    /// Rate of its cable in both directions; `None` without a limit.
    pub mbit_per_s: Option<u32>,
    /// Time whose packets pass the limit at once, in microseconds.
    pub burst_us: u64,
}

const CPU: Devices = Devices { name: "cpu", selector: "cpu", second: None };
const FOUR_CPUS: Devices = Devices { name: "cpu*4", selector: "cpu*4", second: None };
const ADAPTER: Devices = Devices { name: "llvmpipe", selector: "vulkan:llvmpipe", second: None };
const TWO_CPUS: Devices = Devices { name: "cpu*2", selector: "cpu*2", second: None };
const ADAPTER_AND_CPU: Devices =
    Devices { name: "llvmpipe+cpu", selector: "vulkan:llvmpipe,cpu", second: None };
const NODES_20: Devices = Devices {
    name: "cpu-20-cpu",
    selector: "cpu",
    second: Some(SecondNode { selector: "cpu", mbit_per_s: Some(20), burst_us: BURST_US }),
};
const NODES_200: Devices = Devices {
    name: "cpu-200-cpu",
    selector: "cpu",
    second: Some(SecondNode { selector: "cpu", mbit_per_s: Some(200), burst_us: BURST_US }),
};
const NODES_1000: Devices = Devices {
    name: "cpu-1000-cpu",
    selector: "cpu",
    second: Some(SecondNode { selector: "cpu", mbit_per_s: Some(1_000), burst_us: BURST_US }),
};
const ADAPTERS: Devices = Devices {
    name: "llvmpipe-1000-swiftshader",
    selector: "vulkan:llvmpipe",
    second: Some(SecondNode {
        selector: "vulkan:swiftshader",
        mbit_per_s: Some(1_000),
        burst_us: BURST_US,
    }),
};

/// Model on devices.
pub struct Setting<'a> {
    pub model: &'a Model,
    pub devices: &'a Devices,
    /// True for a setting by which the planner was not adjusted; it is reported apart.
    pub is_aside: bool,
}

impl Setting<'_> {
    pub fn name(&self) -> String {
        format!("{}@{}", self.model.name, self.devices.name)
    }
}

const fn setting(model: &'static Model, devices: &'static Devices) -> Setting<'static> {
    Setting { model, devices, is_aside: false }
}

const fn aside(model: &'static Model, devices: &'static Devices) -> Setting<'static> {
    Setting { model, devices, is_aside: true }
}

/// Settings of runs one of whose two devices changes its speed.
pub const GPT_AT_TWO_CPUS: Setting<'static> = setting(&GPT, &TWO_CPUS);
pub const GPT_AT_TWO_NODES: Setting<'static> = setting(&GPT, &NODES_1000);

/// A GPT of equal blocks with a head of its own, and one of the shape of GPT-2's, whose embedding
/// is tied to the head and has a third of the parameters of the blocks.
pub const GPT_EQUAL_BLOCKS: Model = Model {
    name: "gpt-equal",
    arguments: "--set model.width=256 --set model.layers=12 --set model.heads=8 \
                --set model.context=64 --set model.tie=false --batch 72 \
                --set train.sample_tokens=0",
};
pub const GPT2_SHAPE: Model = Model {
    name: "gpt2-shape",
    arguments: "--set model.width=256 --set model.layers=12 --set model.heads=8 \
                --set model.context=64 --set model.vocabulary=12000 --batch 72 \
                --set train.sample_tokens=0",
};

/// Settings of plans.
pub const SETTINGS: [Setting<'static>; 30] = [
    setting(&GPT, &CPU),
    setting(&GPT, &TWO_CPUS),
    setting(&GPT, &FOUR_CPUS),
    setting(&GPT, &ADAPTER),
    setting(&GPT, &ADAPTER_AND_CPU),
    setting(&GPT, &NODES_20),
    setting(&GPT, &NODES_200),
    setting(&GPT, &NODES_1000),
    setting(&GPT_WIDE, &CPU),
    setting(&GPT_WIDE, &TWO_CPUS),
    setting(&GPT_WIDE, &NODES_200),
    setting(&GPT_WIDE, &NODES_1000),
    setting(&GPT_SMALL, &TWO_CPUS),
    setting(&GPT_SMALL, &ADAPTER_AND_CPU),
    setting(&GPT_SMALL, &NODES_20),
    setting(&GPT_SMALL, &ADAPTERS),
    setting(&LLAMA, &CPU),
    setting(&LLAMA, &TWO_CPUS),
    setting(&LLAMA, &ADAPTER_AND_CPU),
    setting(&LLAMA, &NODES_1000),
    setting(&LENET, &CPU),
    setting(&LENET, &TWO_CPUS),
    setting(&LENET, &ADAPTER_AND_CPU),
    setting(&LENET, &NODES_200),
    setting(&LENET, &NODES_1000),
    aside(&GPT_DEEP, &TWO_CPUS),
    aside(&GPT_DEEP, &NODES_200),
    aside(&GPT_WIDE, &ADAPTER_AND_CPU),
    aside(&LLAMA, &NODES_200),
    aside(&LENET, &NODES_20),
];
