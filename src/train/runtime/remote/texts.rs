//! Texts in messages of other nodes, which may be printed: they are sanitized when a message is
//! decoded.

use super::wire::{OpenFailure, Opened, RemoteDeviceSpec, ToFirst};
use potluck_core::decode;
use potluck_net::cluster::{SENTENCE_BYTES_MAX, shown_text};
use potluck_parallel::Outcome;

/// Maximum number of notes of a device.
const NOTES_MAX: usize = 64;
/// Maximum length of an event of a trace in bytes: this program writes a few hundred.
const EVENT_BYTES_MAX: usize = 4096;

impl ToFirst {
    /// Decodes a message. Limits texts to [`SENTENCE_BYTES_MAX`] bytes, and replaces control
    /// characters of terminals by spaces.
    ///
    /// # Errors
    /// Returns a description of invalid bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut message: Self =
            decode(bytes).map_err(|why| format!("bytes that are no message: {why}"))?;
        if let Self::Opened { opened: Ok(Opened { notes, .. }), .. } = &mut message {
            notes.truncate(NOTES_MAX);
        }
        if let Self::Trace(lines) = &message
            && let Some(event) =
                lines.split(|byte| *byte == b'\n').find(|event| event.len() > EVENT_BYTES_MAX)
        {
            let bytes = event.len();
            return Err(format!("an event of a trace with {bytes} bytes of {EVENT_BYTES_MAX}"));
        }
        for text in message.texts_mut() {
            *text = shown_text(text, SENTENCE_BYTES_MAX);
        }
        Ok(message)
    }

    fn texts_mut(&mut self) -> Vec<&mut String> {
        match self {
            Self::Offer(Ok(offered)) => {
                let mut texts = Vec::new();
                for RemoteDeviceSpec { name, identity, .. } in &mut offered.devices {
                    texts.extend([name, identity]);
                }
                texts
            }
            Self::Offer(Err(why)) | Self::Assembled(Err(why)) => vec![why],
            Self::Tuning { compiling, .. } => Vec::from_iter(compiling),
            Self::Opened { opened: Ok(Opened { notes, identity, untimed, .. }), .. } => {
                notes.iter_mut().chain(untimed).chain([identity]).collect()
            }
            Self::Opened { opened: Err(failure), .. } => match failure {
                OpenFailure::Device(error) => error.texts_mut(),
                OpenFailure::NoRoom { adapter, what, needed } => vec![adapter, what, needed],
                OpenFailure::Other(why) => vec![why],
            },
            Self::Reply { reply: Err(error), .. } | Self::Finished { result: Err(error), .. } => {
                error.texts_mut()
            }
            Self::Finished { result: Ok(report), .. } => match &mut report.outcome {
                Outcome::Discarded(why) => vec![why],
                Outcome::Updated | Outcome::Skipped => Vec::new(),
            },
            Self::Signal(_)
            | Self::Reply { reply: Ok(_), .. }
            | Self::Assembled(Ok(()))
            | Self::LinkRate(_)
            | Self::ArrivalRate(_)
            | Self::Vote(_)
            | Self::Activity(_)
            | Self::Working
            | Self::Clock(_)
            | Self::Trace(_)
            | Self::Flushed => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::remote::wire::NodeDevices;
    use potluck_core::Rank;
    use potluck_kernels::device::DeviceError;

    const BAD: &str = "\u{1b}[2Jno\n\u{202e}";

    fn error() -> DeviceError {
        let text = Some(BAD.into());
        DeviceError::Panicked { adapter: BAD.into(), what: BAD.into(), text }
    }

    #[test]
    fn no_text_of_a_message_steers_a_terminal_or_fills_it() {
        let device = RemoteDeviceSpec {
            name: BAD.into(),
            identity: BAD.into(),
            is_cpu: true,
            is_on_host: true,
            binding_bytes: None,
            memory: None,
            host_memory: None,
            adapter: None,
        };
        let opened = Opened {
            notes: vec![BAD.into(); 1000],
            identity: BAD.into(),
            is_cpu: true,
            choices: Default::default(),
            untimed: Vec::new(),
            readback_elements_max: 1,
        };
        let (adapter, what, needed) = (BAD.into(), BAD.into(), BAD.into());
        let no_room = OpenFailure::NoRoom { adapter, what, needed };
        let messages = [
            (2, ToFirst::Offer(Ok(NodeDevices { devices: vec![device], has_data: false }))),
            (1, ToFirst::Offer(Err(BAD.repeat(10_000)))),
            (65, ToFirst::Opened { slot: 0, opened: Ok(opened) }),
            (3, ToFirst::Opened { slot: 0, opened: Err(no_room) }),
            (3, ToFirst::Opened { slot: 0, opened: Err(OpenFailure::Device(error())) }),
            (1, ToFirst::Opened { slot: 0, opened: Err(OpenFailure::Other(BAD.into())) }),
            (3, ToFirst::Reply { id: 0, reply: Err(error()) }),
            (1, ToFirst::Assembled(Err(BAD.into()))),
            (3, ToFirst::Finished { rank: Rank(1), group: 0, result: Err(error()) }),
        ];
        for (count, message) in messages {
            let bytes = postcard::to_allocvec(&message).unwrap();
            let mut decoded = ToFirst::decode(&bytes).unwrap();
            let shown = format!("{decoded:?}");
            // The text of a debug format escapes what is not shown.
            assert!(!shown.contains("\\u") && !shown.contains("\\n"), "{shown}");
            let texts = decoded.texts_mut();
            assert_eq!(texts.len(), count, "{shown}");
            assert!(texts.iter().all(|text| text.starts_with(" [2Jno")), "{shown}");
            assert!(texts.iter().all(|text| text.len() <= SENTENCE_BYTES_MAX));
        }
    }

    #[test]
    fn events_of_a_trace_are_bounded() {
        let sent = |lines: String| {
            ToFirst::decode(&postcard::to_allocvec(&ToFirst::Trace(lines.into())).unwrap())
        };
        let longest = "x".repeat(EVENT_BYTES_MAX);
        assert!(sent(format!("{longest}\n").repeat(100)).is_ok());
        let error = sent(format!("{{}}\n{longest}x\n")).unwrap_err();
        assert_eq!(error, "an event of a trace with 4097 bytes of 4096");
    }
}
