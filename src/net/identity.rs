//! Identity of a node: a certificate that it issues to itself with the key of the run's authority,
//! which every node derives from the [`Secret`]. So knowing the secret makes a node, nothing is
//! exchanged before a connection, and no secret crosses the wire.
//!
//! TLS 1.3 only, both sides authenticated, without session tickets, resumption and 0-RTT, whose
//! data could be replayed (RFC 8446, section 8).

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ED25519,
};
use rustls::client::{ResolvesClientCert, Resumption, WebPkiServerVerifier, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::cipher_suite::{
    TLS13_AES_128_GCM_SHA256, TLS13_CHACHA20_POLY1305_SHA256,
};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use rustls::server::{
    ClientHello, NoServerSessionStorage, ParsedCertificate, ResolvesServerCert,
    WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig, SignatureScheme};
use zeroize::{Zeroize, Zeroizing};

use super::error::NetError;
use super::secret::Secret;
use potluck_core::Lock;

/// Name on which TLS agrees (ALPN, RFC 7301), the same in all protocols: greetings have the number.
const ALPN: &[u8] = b"potluck";
/// Role in a certificate, as the name of a server. Names under `internal` are never in public DNS.
pub const NODE_NAME: &str = "node.potluck.internal";
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Margin for clocks that differ, on both ends of a certificate's life.
const CLOCKS_DIFFER: Duration = DAY;
/// Age at which a node issues itself another certificate. The certificates of a connection are
/// checked once, at its begin, so a run may last longer.
const RENEWED_AFTER: Duration = DAY;
/// Ed25519 private key of 32 bytes in PKCS#8 (RFC 8410): all before the key.
const PKCS8_HEAD: [u8; 16] = *b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20";

/// Authority of a run: its key is a function of the secret.
pub(crate) struct Authority {
    seed: Zeroizing<[u8; 32]>,
    params: CertificateParams,
}

impl Authority {
    /// Creates the authority of all nodes that know the secret. Its name differs for each secret,
    /// so that a certificate of another run has an unknown issuer, and no bad signature.
    pub fn of(secret: &Secret) -> Self {
        let name = secret.derive(b"potluck/1 name of the authority");
        let mut common_name = String::from("potluck run ");
        for byte in &name[..8] {
            common_name += &format!("{byte:02x}");
        }
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        Self { seed: secret.derive(b"potluck/1 key of the authority"), params }
    }

    /// Returns an authority with the key of one secret and the name of another one.
    #[cfg(test)]
    pub(crate) fn impostor(key: &Secret, name: &Secret) -> Self {
        Self { params: Self::of(name).params, ..Self::of(key) }
    }

    fn key(&self) -> Result<KeyPair, NetError> {
        let mut pkcs8 = Zeroizing::new([0; 48]);
        pkcs8[..16].copy_from_slice(&PKCS8_HEAD);
        pkcs8[16..].copy_from_slice(&self.seed[..]);
        let pkcs8 = PrivatePkcs8KeyDer::from(&pkcs8[..]);
        KeyPair::from_pkcs8_der_and_sign_algo(&pkcs8, &PKCS_ED25519).map_err(NetError::identity)
    }

    /// The only root that a node trusts.
    fn roots(&self) -> Result<Arc<RootCertStore>, NetError> {
        let mut key = self.key()?;
        let certificate = self.params.self_signed(&key);
        key.zeroize();
        let mut roots = RootCertStore::empty();
        let certificate = certificate.map_err(NetError::identity)?.der().clone();
        roots.add(certificate).map_err(NetError::identity)?;
        Ok(Arc::new(roots))
    }

    /// Issues a certificate with a fresh key to a role, for a span of time.
    pub(crate) fn issue(
        &self,
        role: &str,
        from: SystemTime,
        until: SystemTime,
    ) -> Result<CertifiedKey, NetError> {
        let leaf = KeyPair::generate_for(&PKCS_ED25519).map_err(NetError::identity)?;
        let mut params = leaf_params(role)?;
        params.not_before = from.into();
        params.not_after = until.into();
        let mut key = self.key()?;
        let signed = params.signed_by(&leaf, &Issuer::from_params(&self.params, &key));
        key.zeroize();
        certified(&leaf, signed.map_err(NetError::identity)?.der().clone())
    }
}

fn leaf_params(role: &str) -> Result<CertificateParams, NetError> {
    let mut params = CertificateParams::new([role.to_owned()]).map_err(NetError::identity)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, role);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    Ok(params)
}

/// Returns a node's certificate that only its own key has signed.
#[cfg(test)]
pub fn self_signed() -> CertifiedKey {
    let leaf = KeyPair::generate_for(&PKCS_ED25519).unwrap();
    let certificate = leaf_params(NODE_NAME).unwrap().self_signed(&leaf).unwrap();
    certified(&leaf, certificate.der().clone()).unwrap()
}

fn certified(
    leaf: &KeyPair,
    certificate: CertificateDer<'static>,
) -> Result<CertifiedKey, NetError> {
    let key = PrivatePkcs8KeyDer::from(leaf.serialize_der()).into();
    CertifiedKey::from_der(vec![certificate], key, &provider()).map_err(NetError::identity)
}

/// Certificate of this process, for both sides of connections. It is renewed when it is a day old.
pub(crate) struct Identity {
    authority: Authority,
    current: Lock<Option<(SystemTime, Arc<CertifiedKey>)>>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity(..)")
    }
}

impl Identity {
    pub fn new(secret: &Secret) -> Result<Self, NetError> {
        let identity = Self { authority: Authority::of(secret), current: Lock::new(None) };
        identity.certificate(SystemTime::now())?;
        Ok(identity)
    }

    /// Certificate to show at the time `now`.
    fn certificate(&self, now: SystemTime) -> Result<Arc<CertifiedKey>, NetError> {
        let mut current = self.current.lock();
        if let Some((issued, certificate)) = &*current {
            // A clock that was set back gives an error here, and another certificate.
            if now.duration_since(*issued).is_ok_and(|age| age < RENEWED_AFTER) {
                return Ok(certificate.clone());
            }
        }
        let until = now + RENEWED_AFTER + CLOCKS_DIFFER;
        let issued = Arc::new(self.authority.issue(NODE_NAME, now - CLOCKS_DIFFER, until)?);
        *current = Some((now, issued.clone()));
        Ok(issued)
    }

    /// Returns the TLS of the side that accepts.
    pub fn server(self: &Arc<Self>) -> Result<ServerConfig, NetError> {
        let roots = self.authority.roots()?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
            .clear_root_hint_subjects()
            .build()
            .map_err(NetError::identity)?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(NetError::identity)?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(self.clone());
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.max_early_data_size = 0;
        config.send_half_rtt_data = false;
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(config)
    }

    /// Returns the TLS of the side that dials.
    pub fn client(self: &Arc<Self>) -> Result<ClientConfig, NetError> {
        let roots = self.authority.roots()?;
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider())
            .build()
            .map_err(NetError::identity)?;
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(NetError::identity)?
            .with_webpki_verifier(verifier)
            .with_client_cert_resolver(self.clone());
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.enable_early_data = false;
        config.resumption = Resumption::disabled();
        Ok(config)
    }
}

impl ResolvesServerCert for Identity {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.certificate(SystemTime::now()).ok()
    }
}

impl ResolvesClientCert for Identity {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.certificate(SystemTime::now()).ok()
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Returns the TLS of both sides in the form of quinn.
pub fn quic(
    server: ServerConfig,
    client: ClientConfig,
) -> Result<(Arc<QuicServerConfig>, Arc<QuicClientConfig>), NetError> {
    let server = QuicServerConfig::try_from(server).map_err(NetError::identity)?;
    let client = QuicClientConfig::try_from(client).map_err(NetError::identity)?;
    Ok((Arc::new(server), Arc::new(client)))
}

/// Returns true if the peer's certificate, which was verified already, is a node's. The side that
/// dials has checked it by the name of the server.
pub(crate) fn is_node(connection: &quinn::Connection) -> bool {
    let Some(identity) = connection.peer_identity() else { return false };
    let Ok(chain) = identity.downcast::<Vec<CertificateDer<'static>>>() else { return false };
    let Some(leaf) = chain.first() else { return false };
    let Ok(leaf) = ParsedCertificate::try_from(leaf) else { return false };
    let Ok(name) = ServerName::try_from(NODE_NAME) else { return false };
    verify_server_name(&leaf, &name).is_ok()
}

/// Returns the cryptography of ring with two cipher suites: the one that is fastest where the
/// processor has instructions for AES, and one for processors without them.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![TLS13_AES_128_GCM_SHA256, TLS13_CHACHA20_POLY1305_SHA256],
        ..rustls::crypto::ring::default_provider()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authorities_of_a_secret_are_one_and_of_two_are_two() {
        let [a, b] = [Secret::generate().unwrap(), Secret::generate().unwrap()];
        let public =
            |secret: &Secret| Authority::of(secret).key().unwrap().public_key_raw().to_vec();
        assert_eq!(public(&a), public(&a));
        assert_ne!(public(&a), public(&b));
        let name = |secret: &Secret| Authority::of(secret).params.distinguished_name;
        assert_ne!(name(&a), name(&b));
    }

    #[test]
    fn a_certificate_is_kept_for_a_day_and_issued_anew_then() {
        let identity = Identity::new(&Secret::generate().unwrap()).unwrap();
        let now = SystemTime::now();
        let at = |now| identity.certificate(now).unwrap().cert[0].clone();
        let first = at(now);
        assert_eq!(at(now + DAY / 2), first);
        let second = at(now + DAY + Duration::from_secs(60));
        assert_ne!(second, first);
        // The clock was set back.
        assert_ne!(at(now - DAY), second);
    }

    #[test]
    fn nothing_prints_the_key() {
        let identity = Identity::new(&Secret::generate().unwrap()).unwrap();
        assert_eq!(format!("{identity:?}"), "Identity(..)");
        let leaf = identity.certificate(SystemTime::now()).unwrap();
        let printed = format!("{leaf:?}");
        assert!(printed.len() < 10_000 && !printed.contains("seed"), "{printed}");
    }
}
