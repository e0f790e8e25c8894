//! Attacks by strangers who speak QUIC with a TLS of their own: no certificate, a self-signed one,
//! and early data. They knock with what they have seen others knock with, or get no answer.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use potluck_net::Endpoint;
use quinn::ConnectionId;
use quinn::crypto::rustls::QuicClientConfig;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};
use tokio::runtime::{Builder, Runtime};

use super::{Attacked, endpoint};

/// Takes any server.
#[derive(Debug)]
struct Gullible(Arc<CryptoProvider>);

impl ServerCertVerifier for Gullible {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

struct Stranger {
    runtime: Runtime,
    endpoint: quinn::Endpoint,
}

impl Stranger {
    fn new() -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let guard = runtime.enter();
        let endpoint = quinn::Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        drop(guard);
        Self { runtime, endpoint }
    }

    /// Connects, with early data if there was a ticket to send it with, and returns why the node
    /// ended it; nothing if it does not answer.
    fn end_of(
        &self,
        node: SocketAddr,
        tls: ClientConfig,
        knock: Option<ConnectionId>,
    ) -> Option<String> {
        let tls = QuicClientConfig::try_from(tls).unwrap();
        let mut config = quinn::ClientConfig::new(Arc::new(tls));
        let mut limit = Duration::from_millis(500);
        if let Some(knock) = knock {
            config.initial_dst_cid_provider(Arc::new(move || knock));
            limit = Duration::from_secs(10);
        }
        let connect = async {
            let connecting = self.endpoint.connect_with(config, node, "node.potluck.internal");
            let connecting = match connecting.unwrap().into_0rtt() {
                Ok(_) => return "early data was sent".to_string(),
                Err(connecting) => connecting,
            };
            // The side that dials completes TLS before the other one has checked its certificate.
            match connecting.await {
                Ok(connection) => connection.closed().await.to_string(),
                Err(error) => error.to_string(),
            }
        };
        let ended = self.runtime.block_on(async { tokio::time::timeout(limit, connect).await });
        ended.ok()
    }
}

/// Returns a knock of a node of the run, as it is seen on its way.
fn seen_knock(node: &Endpoint) -> ConnectionId {
    let ear = UdpSocket::bind("127.0.0.1:0").unwrap();
    node.dial(ear.local_addr().unwrap(), Duration::from_millis(50)).unwrap_err();
    let mut packet = [0; 2048];
    ear.recv(&mut packet).unwrap();
    // Behind the form, the version and its own length (RFC 9000, section 17.2).
    ConnectionId::new(&packet[6..6 + usize::from(packet[5])])
}

fn tls(certificate: Option<(CertificateDer<'static>, PrivateKeyDer<'static>)>) -> ClientConfig {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Gullible(provider)));
    let mut tls = match certificate {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => builder.with_client_auth_cert(vec![certificate], key).unwrap(),
    };
    tls.alpn_protocols = vec![b"potluck".to_vec()];
    tls.enable_early_data = true;
    tls.resumption = Resumption::in_memory_sessions(8);
    tls
}

fn self_signed() -> (CertificateDer<'static>, PrivateKeyDer<'static>) {
    let names = ["node.potluck.internal".to_string()];
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(names).unwrap();
    (cert.der().clone(), PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap())
}

#[test]
fn strangers_in_run_are_refused() {
    let run = Attacked::begin();
    let stranger = Stranger::new();
    let honest = endpoint(&run.desk.path("code"));
    let knock = || Some(seen_knock(&honest));
    for node in [run.first, run.second] {
        for certificate in [None, Some(self_signed())] {
            let tls = tls(certificate);
            // The second time with the tickets of the first one, if there were any.
            for _ in 0..2 {
                let why = stranger.end_of(node, tls.clone(), knock()).expect("the node ends it");
                assert!(why.contains("certificate") || why.contains("CA"), "{why}");
            }
        }
        let mut other = tls(Some(self_signed()));
        other.alpn_protocols = vec![b"h3".to_vec()];
        let why = stranger.end_of(node, other.clone(), knock()).expect("the node ends it");
        assert!(why.contains("error 120"), "{why}");
        assert_eq!(stranger.end_of(node, other, None), None, "without a knock");
    }
    run.check_unharmed();
}
