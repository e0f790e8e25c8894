//! potluck trains neural networks on every GPU you have, from any vendor.
//!
//! The kernels are WGSL compute shaders on wgpu; the trainer is a library first and a program on
//! top of it. This crate names what a program that uses the library needs; `docs/library.md` has
//! the order in which to read it.
//!
//! | to | start at |
//! |---|---|
//! | train a model on batches or a data set of your own | [`train::Trainer`] |
//! | write a model | [`graph::Builder`], or one of [`model`] |
//! | give an op of your own its kernel and its gradient | [`custom_op::CustomOp`] |
//! | read samples, texts and tokens from files | [`data`] |
//! | see what happens in a run | [`metrics::Event`] |
//! | read and write saved parameters | [`checkpoint::Checkpoint`] |
//! | exchange values between threads, processes and machines | [`collectives`] |
//! | list devices | [`device::list_adapters`] |
//! | measure devices | [`mod@bench`] |
//!
//! The crates `potluck-*` are its parts; `ARCHITECTURE.md` has their map. They are no interface:
//! any release may change them.
//!
//! | feature | |
//! |---|---|
//! | `cli`, on by default | the program `potluck`, and `train` |
//! | `train` | the trainer, data, devices and kernels, benchmarks: the modules that need wgpu |
//! | none | [`collectives`], [`graph`] and [`model`], without wgpu |

#[cfg(feature = "train")]
pub mod gantt;

pub use potluck_core::rng::Key;
pub use potluck_core::{DType, HostTensor, HostTensorView, ParamId, Rank, Shape, TensorId};

/// Graphs of operations, and the builder with which models are written.
pub mod graph {
    pub use potluck_graph::builder::{BuildResult, Builder};
    pub use potluck_graph::{
        AttentionOptions, AttentionPlace, Binary, BinarySide, Cell, ColumnRange, Conv2dOptions,
        CrossEntropyOptions, Domain, DotAttentionOptions, Graph, IGNORE_INDEX, Init, Interpolation,
        LossReduction, LossTerm, Op, ParameterKind, ParameterSplit, Pool2dOptions, PoolDivisor,
        Reduction, RotaryAngles, RotaryScaling, ShapeError, Slope, SplitUnit, StateInit, Unary,
    };
}

/// Ops of a program's own: a kernel in WGSL, a reference in f64, and a gradient.
#[cfg(feature = "train")]
pub mod custom_op {
    pub use potluck_graph::{CustomCall, CustomInput, CustomKernel, CustomNode};
    pub use potluck_kernels::autotune::{KernelCheckError, check_kernel};
    pub use potluck_kernels::dispatch::grid;
    pub use potluck_kernels::{GradientError, check_gradient};

    /// # Example
    ///
    /// One over the root mean square of each row:
    ///
    /// ```
    /// use potluck::{HostTensorView, Shape, TensorId};
    /// use potluck::graph::BuildResult;
    /// use potluck::custom_op::{CustomCall, CustomKernel, CustomNode, CustomOp};
    /// use potluck::graph::{Builder, Op};
    /// use potluck::custom_op::check_gradient;
    /// use potluck::custom_op::grid;
    ///
    /// #[derive(Clone)]
    /// struct InverseRms;
    ///
    /// impl CustomOp for InverseRms {
    ///     fn name(&self) -> String {
    ///         "inverse_rms".into()
    ///     }
    ///
    ///     /// `x (.., c) -> y (..)`
    ///     fn shape(&self, inputs: &[&Shape]) -> Result<Shape, String> {
    ///         let (_, rows) = inputs[0].dims().split_last().ok_or("needs a row")?;
    ///         if rows.is_empty() {
    ///             return Err("needs rows".into());
    ///         }
    ///         Ok(inputs[0].with_dims(rows))
    ///     }
    ///
    ///     /// `dx = -x y^3 dy / c`
    ///     fn gradient(&self, b: &mut Builder, node: &CustomNode, _: usize) -> BuildResult {
    ///         let (x, y) = (node.inputs[0], node.output);
    ///         let (c, axis) = (b.shape(x).last(), b.shape(y).rank());
    ///         let (squared, slope) = (b.mul(y, y)?, b.mul(y, node.dy)?);
    ///         let of_row = b.mul(squared, slope)?;
    ///         let wide = Op::Broadcast { first: axis, dims: vec![c], batched: false };
    ///         let of_element = b.apply(wide, &[of_row])?;
    ///         let product = b.mul(of_element, x)?;
    ///         b.scale(product, -1.0 / c as f32)
    ///     }
    ///
    ///     fn reference(&self, call: &CustomCall, x: &[HostTensorView<'_, f64>], y: &mut [f64]) {
    ///         let c = call.inputs[0][call.inputs[0].len() - 1];
    ///         for (row, y) in x[0].floats().chunks(c).zip(y) {
    ///             let mean = row.iter().map(|x| x * x).sum::<f64>() / c as f64;
    ///             *y = (mean + 1e-5).sqrt().recip();
    ///         }
    ///     }
    ///
    ///     fn kernel(&self, call: &CustomCall) -> CustomKernel {
    ///         let rows = call.output_len();
    ///         let params = vec![rows as u32, (call.input_len(0) / rows) as u32];
    ///         CustomKernel { wgsl: WGSL.into(), params, workgroups: grid(rows, 64) }
    ///     }
    /// }
    ///
    /// const WGSL: &str = "
    ///     struct Params { rows: u32, c: u32 }
    ///     var<immediate> p: Params;
    ///     @group(0) @binding(0) var<storage, read> x: array<f32>;
    ///     @group(0) @binding(1) var<storage, read_write> y: array<f32>;
    ///
    ///     @compute @workgroup_size(64)
    ///     fn main(
    ///         @builtin(global_invocation_id) id: vec3u,
    ///         @builtin(num_workgroups) groups: vec3u,
    ///     ) {
    ///         let row = id.x + id.y * (groups.x * 64u);
    ///         if row >= p.rows { return; }
    ///         var sum = 0.0;
    ///         for (var i = 0u; i < p.c; i++) { sum += pow(abs(x[row * p.c + i]), 2.0); }
    ///         y[row] = inverseSqrt(sum / f32(p.c) + 1e-5);
    ///     }
    /// ";
    ///
    /// check_gradient(InverseRms, &[Shape::batched(&[1, 4, 6])], 7)?;
    /// let mut b = Builder::new();
    /// let x = b.input("x", &[1, 4, 6]);
    /// let y = b.custom(InverseRms, &[x])?;
    /// assert_eq!(b.shape(y), &Shape::batched(&[1, 4]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[doc(inline)]
    pub use potluck_graph::CustomOp;
    /// # Example
    ///
    /// A SiLU gate, `x g / (1 + exp(-g))`:
    ///
    /// ```
    /// use potluck::Shape;
    /// use potluck::custom_op::{Elementwise, check_gradient};
    ///
    /// fn sigmoid(g: f64) -> f64 {
    ///     1.0 / (1.0 + (-g).exp())
    /// }
    ///
    /// let gate = Elementwise::new("gate", &["x", "g"], "x * g / (1.0 + exp(-g))", |v| {
    ///     v[0] * v[1] * sigmoid(v[1])
    /// })
    /// .with_gradient("dy * g / (1.0 + exp(-g))", |v| v[2] * v[1] * sigmoid(v[1]))
    /// .with_gradient("dy * x / (1.0 + exp(-g)) * (1.0 + g / (1.0 + exp(g)))", |v| {
    ///     v[2] * v[0] * sigmoid(v[1]) * (1.0 + v[1] * sigmoid(-v[1]))
    /// });
    /// let shape = Shape::batched(&[1, 5]);
    /// check_gradient(gate, &[shape.clone(), shape], 1)?;
    /// # Ok::<(), potluck::custom_op::GradientError>(())
    /// ```
    #[doc(inline)]
    pub use potluck_kernels::Elementwise;
}

/// Models that are here: perceptrons, transformers, convolutional, residual and recurrent networks,
/// with PyTorch's names of parameters, and those in Hugging Face's files.
pub mod model {
    pub use potluck_graph::model::names::{FileName, our_name, their_name};
    pub use potluck_graph::model::{
        AttentionBias, CnnConfig, GPT_NAMES, GptConfig, LLAMA_NAMES, LanguageModel, LlamaConfig,
        MlpConfig, MlpLoss, PictureNorm, PictureSizes, ResnetConfig, RnnConfig, cnn, gpt, llama,
        mlp, resnet, rnn,
    };
}

/// Layers as functions that add their parameters, under PyTorch's names and with its initial
/// values.
pub mod nn {
    pub use potluck_graph::nn::{
        BatchNormOptions, batch_norm, conv_transpose2d, conv2d, embedding, group_norm, layer_norm,
        linear, linear_without_bias, recurrent, rms_norm, self_attention,
    };
}

/// Update rules and schedules of the learning rate.
pub mod optim {
    pub use potluck_graph::UpdateRates;
    pub use potluck_graph::optim::{
        Decay, GroupRule, OneCycle, Optimizer, ParameterGroup, ParameterGroupError, Schedule,
    };
}

/// Data sets, readers of samples, texts and tokens, and tokenizers.
#[cfg(feature = "train")]
pub mod data {
    pub use potluck_data::formats::load;
    pub use potluck_data::{
        Augmentation, ChatMessage, ChatTemplate, DataDescription, DataError, DataFile, Dataset,
        DatasetInput, Features, FileRole, LazyFeatures, LoadedSamples, MeanStd, NamedInputs,
        Normalization, PrepareError, PrepareOptions, PrepareProgress, Prepared, ReadOptions,
        SampleDescription, SampleFormat, SampleOptions, SampleSet, Samples, Split, TargetKind,
        TargetNames, Targets, TextData, TextWindows, TokenFile, TokenWindows, Tokenizer,
        TokenizerChoice, TokenizerFile, TokenizerKind, prepare,
    };
}

/// Training of any graph on one device or several.
#[cfg(feature = "train")]
pub mod train {
    pub use potluck_graph::{ActivationFormat, MomentFormat, Precision, Recompute};
    pub use potluck_parallel::collective::Topology;
    pub use potluck_parallel::{
        DeviceLoss, ExcludedDivisions, MismatchAction, PipelineOptions, PipelineSchedule,
        Placement, ReduceSite, ShareChange, Shares, TensorOptions,
    };
    pub use potluck_train::error::LibraryError;
    pub use potluck_train::evaluate::Evaluation;
    pub use potluck_train::task::{
        Classification, LossTask, Regression, Task, TextTask, TokenTask, task_of_samples,
    };
    pub use potluck_train::{
        FitEnd, FitLength, FitOptions, FitReport, PredictorOptions, Step, TrainError,
        TrainerOptions,
    };

    /// # Example
    ///
    /// ```
    /// use ndarray::array;
    /// use potluck::HostTensor;
    /// use potluck::graph::Unary;
    /// use potluck::model::{MlpConfig, MlpLoss, mlp};
    /// use potluck::optim::Optimizer;
    /// use potluck::train::{Trainer, TrainerOptions};
    ///
    /// let config = MlpConfig {
    ///     widths: vec![2, 8, 1],
    ///     activation: Unary::GeluTanh,
    ///     dropout: 0.0, loss: MlpLoss::SquaredError,
    /// };
    /// let optimizer = Optimizer::Sgd { momentum: 0.9, weight_decay: 0.0 };
    /// let mut trainer = Trainer::new(mlp(&config)?, &TrainerOptions::new("cpu", optimizer, 2))?;
    /// let batch = [
    ///     ("inputs", HostTensor::from(array![[0.0, 1.0], [1.0, 0.0]])),
    ///     ("targets", HostTensor::from(array![[1.0], [-1.0]])),
    /// ];
    /// let before = trainer.step(&batch, 0.1)?.loss;
    /// let after = trainer.step(&batch, 0.1)?.loss;
    /// assert!(after < before);
    /// # Ok::<(), potluck::train::TrainError>(())
    /// ```
    #[doc(inline)]
    pub use potluck_train::Trainer;

    /// # Example
    ///
    /// A model of PyTorch's, whose `state_dict` is in a file:
    ///
    /// ```no_run
    /// use std::path::Path;
    /// use potluck::HostTensor;
    /// use potluck::graph::Builder;
    /// use potluck::nn;
    /// use potluck::train::{Predictor, PredictorOptions};
    ///
    /// let mut b = Builder::new();
    /// let x = b.input("x", &[1, 784]);
    /// let hidden = nn::linear(&mut b, "fc1", x, 128)?;
    /// let hidden = b.relu(hidden)?;
    /// let logits = nn::linear(&mut b, "fc2", hidden, 10)?;
    /// b.output("logits", logits);
    /// let (options, file) = (PredictorOptions::new("auto"), Path::new("mnist.safetensors"));
    /// let mut model = Predictor::from_file(b.finish(), &options, file)?;
    /// let pictures = HostTensor::Float(vec![0.0; 2 * 784]);
    /// let logits = model.predict("logits", 2, &[("x", pictures)])?;
    /// assert_eq!(logits.shape(), [2, 10]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[doc(inline)]
    pub use potluck_train::Predictor;
}

/// Saved states of a run: parameters, moments and where it was.
#[cfg(feature = "train")]
pub mod checkpoint {
    pub use potluck_train::checkpoint::{
        Best, Checkpoint, CheckpointError, Meta, NamedTensor, Store,
    };
    pub use potluck_train::given_parameters::parameters_of_file;
}

/// Events of a run, and sinks that take them.
pub mod metrics {
    pub use potluck_core::metrics::{
        EvalRecord, Event, MeasureRecord, MeasuredValue, MetricsError, PredictedGain, RankCost,
        RankRecord, Recorder, RunCost, ShareRecord, Sink, Sinks, SoloSpeed, StageRecord,
        StepRecord, TensorBoard, Truncation, Unit,
    };
}

/// Collectives between ranks, which are threads of one process or of several, on one machine or
/// several.
pub mod collectives {
    pub use potluck_net::nodes::{ClusterOptions, ConnectEvent, First};
    pub use potluck_net::{Congestion, Secret};
    pub use potluck_parallel::comm::{GroupError, ReduceOp, Transferable};

    /// # Groups of some ranks
    ///
    /// ```
    /// use potluck::collectives::{ReduceOp, init};
    ///
    /// std::thread::scope(|scope| {
    ///     for mut group in init(5) {
    ///         scope.spawn(move || {
    ///             let rank = group.rank().0;
    ///             // Ranks 0, 2 and 4 in descending order, and ranks 1 and 3 likewise.
    ///             let mut half = group.split(Some(rank % 2), -i64::from(rank)).unwrap().unwrap();
    ///             let mut sum = [rank];
    ///             half.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    ///             let is_even = rank % 2 == 0;
    ///             assert_eq!(sum, if is_even { [0 + 2 + 4] } else { [1 + 3] });
    ///             let members = if is_even { "{4, 2, 0}" } else { "{3, 1}" };
    ///             assert_eq!(half.members().to_string(), members);
    ///             group.barrier().unwrap();
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// A list of ranks names a group, too:
    ///
    /// ```
    /// use potluck::Rank;
    /// use potluck::collectives::init;
    ///
    /// std::thread::scope(|scope| {
    ///     for mut world in init(4) {
    ///         scope.spawn(move || {
    ///             let group = world.new_group(&[Rank(3), Rank(1)]).unwrap();
    ///             let position = group.map(|group| group.position().0);
    ///             assert_eq!(position, [None, Some(1), None, Some(0)][world.rank().index()]);
    ///         });
    ///     }
    /// });
    /// ```
    #[doc(inline)]
    pub use potluck_parallel::comm::ProcessGroup;
    /// # Example
    ///
    /// ```
    /// use potluck::collectives::{ReduceOp, init};
    ///
    /// std::thread::scope(|scope| {
    ///     for mut group in init(3) {
    ///         scope.spawn(move || {
    ///             let mut values = [f32::from(group.rank().0 as u8), 1.0];
    ///             group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
    ///             assert_eq!(values, [0.0 + 1.0 + 2.0, 3.0]);
    ///         });
    ///     }
    /// });
    /// ```
    #[doc(inline)]
    pub use potluck_parallel::comm::init;

    /// Connects this process with others to one group, and returns its handles, in order of ranks.
    /// One process is the first one ([`First::Host`]), which all others join; then all are
    /// connected with each other. Ranks are numbered over the processes without a gap: those of the
    /// first one come first, then those of the others in the order in which they joined.
    ///
    /// The handles are those of [`init`], with the same methods and the same bits for the same
    /// ranks. A rank sends to one of another process over QUIC (RFC 9000), authenticated by the
    /// secret. All processes must run the same build of the library.
    ///
    /// **Failures.** A process that is lost, because it was killed, is silent for
    /// [`ClusterOptions::timeout`], or cannot be reached by one of the others, ends every call of
    /// every process, with an error that names its ranks and its host. A process leaves in order
    /// when its last handle is dropped; that waits until what was sent has arrived, for at most two
    /// seconds, and in the first process, on which the others depend, until they have left, for at
    /// most the timeout.
    ///
    /// ```
    /// use std::sync::mpsc;
    /// use potluck::collectives::{ClusterOptions, ConnectEvent, ReduceOp, Secret, connect};
    ///
    /// let code = Secret::generate()?.code().expect("a new secret has a code");
    /// let (tell, told) = mpsc::channel();
    /// // Two threads here; two processes are the same, on one machine or two.
    /// let add = |options: ClusterOptions| {
    ///     let mut group = connect(options)?.remove(0);
    ///     let mut values = [group.rank().0, 1];
    ///     group.all_reduce(&mut values, ReduceOp::Sum)?;
    ///     Ok::<_, potluck::collectives::GroupError>(values)
    /// };
    /// let mut first = ClusterOptions::host("127.0.0.1:0".parse()?, 2, Secret::parse(&code)?);
    /// first.on_news = Box::new(move |news| {
    ///     if let ConnectEvent::Listening(address) = news {
    ///         tell.send(address.to_string()).expect("somebody listens");
    ///     }
    /// });
    /// let first = std::thread::spawn(move || add(first));
    /// let other = add(ClusterOptions::join(told.recv()?, Secret::parse(&code)?))?;
    /// assert_eq!((first.join().expect("no panic")?, other), ([0 + 1, 2], [1, 2]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns [`GroupError::Connect`] for options beyond their bounds, an address that is taken or
    /// not found, a first process that cannot be reached or refuses this one, and if the timeout
    /// expires.
    pub fn connect(options: ClusterOptions) -> Result<Vec<ProcessGroup>, GroupError> {
        potluck_core::set_build_hash(env!("POTLUCK_BUILD"));
        potluck_net::nodes::connect(options)
    }
}

/// Devices of this machine.
#[cfg(feature = "train")]
pub mod device {
    pub use potluck_kernels::device::{
        Adapter, AdapterKind, CooperativeMatrix, DeviceError, Features, Gpu, Limits, ShaderChecks,
        list_adapters,
    };
}

/// The benchmark suite.
#[cfg(feature = "train")]
pub mod bench {
    pub use potluck_bench::{
        DeviceReport, Direction, Effort, Figure, FigureKind, Options, Part, Report, ReportError,
        compare,
    };

    /// # Example
    ///
    /// ```
    /// use potluck::bench::{Effort, Options, Part, compare, run};
    ///
    /// let options = Options {
    ///     devices: "cpu".into(),
    ///     effort: Effort::Tiny,
    ///     parts: vec![Part::Peaks],
    ///     full: false,
    /// };
    /// let report = run(&options, &mut |progress| eprintln!("{progress}"))?;
    /// let peak = report.devices[0].figure("peak.flops").expect("every device has it");
    /// assert!(peak.median > 0.0 && peak.unit == "GFLOP/s");
    /// println!("{report}\n{}", compare(&report, &report));
    /// # Ok::<(), potluck::train::TrainError>(())
    /// ```
    #[doc(inline)]
    pub use potluck_bench::run;
}

/// The program in the guide, compiled and run as a documentation test.
#[cfg(all(doctest, feature = "train"))]
#[doc = include_str!("../docs/guide.md")]
pub struct Guide;
