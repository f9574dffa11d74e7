import java.util.HashSet;
import java.util.IdentityHashMap;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.catalyst.analysis.UnresolvedFunction;
import org.apache.spark.sql.catalyst.analysis.UnresolvedGenerator;
import org.apache.spark.sql.catalyst.analysis.UnresolvedRelation;
import org.apache.spark.sql.catalyst.analysis.UnresolvedTableValuedFunction;
import org.apache.spark.sql.catalyst.catalog.SessionCatalog;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.Concat;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.ExpressionInfo;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.objects.Invoke;
import org.apache.spark.sql.catalyst.expressions.objects.StaticInvoke;
import org.apache.spark.sql.catalyst.plans.logical.Command;
import org.apache.spark.sql.catalyst.plans.logical.LocalRelation;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.ParsedStatement;
import org.apache.spark.sql.catalyst.plans.logical.UnresolvedWith;
import org.apache.spark.sql.catalyst.plans.logical.View;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.ObjectType;

/**
 * Determines what a statement would access: the relations and functions that it names, and the
 * first node that is not permitted (`actors.engine.catalyst.permitted_functions`). Compiled by
 * Janino, which comes with Spark and supports neither generics nor lambdas.
 *
 * A text is inspected twice. Once it is parsed, nothing is resolved yet: no file was looked up, no
 * catalog opened and no constant computed, all of which analysis may do. Once it is analysed,
 * functions are classes, whatever their names were.
 *
 * All fields of a node are visited, not only its children, since whatever is in a field is run too.
 */
public class StatementInspector {
  private static final String UNRESOLVED = "org.apache.spark.sql.catalyst.analysis.";
  private static final String[] OUR_CODE = new String[] {
    "org.apache.spark.sql.catalyst.", "org.apache.spark.unsafe.",
  };
  private static volatile Set functions = new HashSet();
  private static volatile Set tableFunctions = new HashSet();
  private static volatile Set nodes = new HashSet();
  private static volatile Set refusedOptions = new HashSet();

  private final SparkSession session;
  private final boolean exactNames;
  private final Map seen = new IdentityHashMap();
  private final StringBuilder relations = new StringBuilder();
  private final StringBuilder called = new StringBuilder();
  private final StringBuilder unknown = new StringBuilder();
  private String command = "";
  private String refusedKind = "";
  private String refused = "";

  /** Needed by the reflection of the caller; all methods are static. */
  public StatementInspector() {
    this(null);
  }

  private StatementInspector(SparkSession session) {
    this.session = session;
    this.exactNames = session != null && session.sessionState().conf().caseSensitiveAnalysis();
  }

  /** Sets what is permitted: names of classes, separated by spaces, and options in lower case. */
  public static void permit(String functions, String tables, String nodes, String options) {
    StatementInspector.functions = words(functions);
    StatementInspector.tableFunctions = words(tables);
    StatementInspector.nodes = words(nodes);
    StatementInspector.refusedOptions = words(options);
  }

  private static Set words(String text) {
    return new HashSet(java.util.Arrays.asList(text.split(" ")));
  }

  // Questions.

  /** Returns what a statement names, as JSON. Throws Spark's error for one that does not parse. */
  public static String statement(Object session, String text) throws Exception {
    StatementInspector inspector = new StatementInspector((SparkSession) session);
    inspector.visit(inspector.session.sessionState().sqlParser().parsePlan(text), null);
    return inspector.json();
  }

  /** Returns the same for a single expression. */
  public static String expression(Object session, String text) throws Exception {
    StatementInspector inspector = new StatementInspector((SparkSession) session);
    inspector.visit(inspector.session.sessionState().sqlParser().parseExpression(text), null);
    return inspector.json();
  }

  /** Returns the same for an analysed plan, whose relations and functions no longer have names. */
  public static String plan(Object plan) throws Exception {
    StatementInspector inspector = new StatementInspector(null);
    inspector.visit(plan, null);
    return inspector.json();
  }

  // A tree, with the names of table expressions that are known in it.

  /** The name of a table expression, and those in the enclosing scopes. */
  private static final class Known {
    final String name;
    final Known around;

    Known(String name, Known around) {
      this.name = name;
      this.around = around;
    }
  }

  private boolean isKnown(String name, Known known) {
    for (Known at = known; at != null; at = at.around) {
      if (exactNames ? at.name.equals(name) : at.name.equalsIgnoreCase(name)) return true;
    }
    return false;
  }

  private void visit(Object value, Known known) throws Exception {
    if (value == null || !refused.isEmpty() || !command.isEmpty()) return;
    if (value instanceof TreeNode) {
      visitNode((TreeNode) value, known);
    } else if (value instanceof scala.Option) {
      if (((scala.Option) value).isDefined()) visit(((scala.Option) value).get(), known);
    } else if (value instanceof scala.collection.Iterable && !(value instanceof DataType)) {
      scala.collection.Iterator each = ((scala.collection.Iterable) value).iterator();
      while (each.hasNext()) visit(each.next(), known);
    } else if (value instanceof scala.Product && !(value instanceof DataType)) {
      visitFields((scala.Product) value, known);
    }
  }

  private void visitFields(scala.Product node, Known known) throws Exception {
    scala.collection.Iterator values = node.productIterator();
    while (values.hasNext()) visit(values.next(), known);
  }

  private void visitNode(TreeNode node, Known known) throws Exception {
    // An analysed plan may contain the same subtree many times; a parsed one does not.
    if (session == null && seen.put(node, node) != null) return;
    String kind = node.getClass().getName();
    if (node instanceof Command || node instanceof ParsedStatement) {
      command = node.nodeName();
    } else if (node instanceof StaticInvoke || node instanceof Invoke) {
      visitInvoked((Expression) node, known);
    } else if (kind.equals(UNRESOLVED + "PlanWithUnresolvedIdentifier")
        || kind.equals(UNRESOLVED + "ExpressionWithUnresolvedIdentifier")) {
      visitComputedName(node, known);
    } else if (!nodes.contains(kind)) {
      boolean plan = node instanceof LogicalPlan;
      String name = plan ? node.nodeName() : ((Expression) node).prettyName();
      refuse(plan ? "construct" : "function", name);
    } else if (node instanceof Literal || node instanceof Attribute
        && !kind.startsWith(UNRESOLVED) || node instanceof LocalRelation) {
      return;  // values and names alone
    } else if (node instanceof View) {
      visit(((View) node).child(), known);
    } else if (node instanceof UnresolvedWith) {
      visitWith((UnresolvedWith) node, known);
    } else {
      visitNamed(node, known);
      if (node instanceof Expression) visitOptions((Expression) node);
      visitFields((scala.Product) node, known);
    }
  }

  /** Spark's own code, by which functions are replaced; no function of SQL can name other code. */
  private void visitInvoked(Expression node, Known known) throws Exception {
    Class code = null;
    if (node instanceof StaticInvoke) {
      code = ((StaticInvoke) node).staticObject();
    } else {
      DataType target = ((Invoke) node).targetObject().dataType();
      // A method of a value is a method of one of Spark's own values.
      if (target instanceof ObjectType) code = ((ObjectType) target).cls();
    }
    boolean ours = code == null;
    for (int i = 0; i < OUR_CODE.length; i++) {
      ours = ours || code.getName().startsWith(OUR_CODE[i]);
    }
    if (ours) visitFields((scala.Product) node, known); else refuse("function", code.getName());
  }

  private void visitWith(UnresolvedWith node, Known known) throws Exception {
    Known inner = known;
    scala.collection.Iterator all = node.cteRelations().iterator();
    while (all.hasNext()) {
      scala.Product relation = (scala.Product) all.next();
      Known next = new Known((String) relation.productElement(0), inner);
      visit(relation.productElement(1), node.allowRecursion() ? next : inner);
      inner = next;
    }
    visit(node.child(), inner);
  }

  private void visitNamed(TreeNode node, Known known) {
    if (node instanceof UnresolvedRelation) {
      UnresolvedRelation it = (UnresolvedRelation) node;
      scala.collection.Seq name = it.multipartIdentifier();
      if (it.isStreaming()) refuse("construct", "STREAM");
      if (name.length() > 1 || !isKnown((String) name.head(), known)) {
        add(relations, list(name));
      }
    } else if (node instanceof UnresolvedFunction) {
      UnresolvedFunction it = (UnresolvedFunction) node;
      String made = visitCall(it.nameParts(), false);
      if (made != null && made.contains("Xml")) visitXml(it);
    } else if (node instanceof UnresolvedGenerator) {
      scala.collection.Seq name = ((UnresolvedGenerator) node).name().nameParts();
      visitCall(name, false);
    } else if (node instanceof UnresolvedTableValuedFunction) {
      visitCall(((UnresolvedTableValuedFunction) node).name(), true);
    }
  }

  // Functions by name.

  /** Returns the class of a function that is permitted; null for any other. */
  private String visitCall(scala.collection.Seq parts, boolean table) {
    String name = (String) parts.last();
    String whole = parts.mkString(".");
    add(called, quoted(whole));
    if (parts.length() > 1) {
      String before = whole.substring(0, whole.length() - name.length() - 1);
      String place = before.toLowerCase(Locale.ROOT);
      if (!place.equals("builtin") && !place.equals("system.builtin")) {
        refuse("function", whole);
        return null;
      }
    }
    SessionCatalog catalog = session.sessionState().catalog();
    scala.Option found = table
        ? catalog.lookupBuiltinOrTempTableFunction(name)
        : catalog.lookupBuiltinOrTempFunction(name);
    // A function that makes rows may also be called as a table, and the other way round.
    if (found.isEmpty()) {
      add(unknown, quoted(whole));
      return null;
    }
    String kind = ((ExpressionInfo) found.get()).getClassName();
    if ((table ? tableFunctions : functions).contains(kind)) return kind;
    refuse("function", whole);
    return null;
  }

  /** A name that is computed only from texts counts as that name; any other computation is
   *  refused. */
  private void visitComputedName(TreeNode node, Known known) throws Exception {
    scala.Product fields = (scala.Product) node;
    Object name = fields.productElement(0);
    scala.Function2 builder = null;
    Object others = null;
    for (int i = 1; i < fields.productArity(); i++) {
      Object field = fields.productElement(i);
      if (field instanceof scala.Function2) builder = (scala.Function2) field;
      if (field instanceof scala.collection.Seq) others = field;
    }
    if (builder == null || others == null || !isText((Expression) name)) {
      refuse("construct", "IDENTIFIER of a computed name");
      return;
    }
    String text = ((Expression) name).eval(null).toString();
    Object parts = session.sessionState().sqlParser().parseMultipartIdentifier(text);
    visit(builder.apply(parts, others), known);
  }

  private static boolean isText(Expression node) {
    if (node instanceof Literal) return ((Literal) node).value() != null
        && node.dataType() instanceof org.apache.spark.sql.types.StringType;
    if (!(node instanceof Concat)) return false;
    scala.collection.Iterator below = node.children().iterator();
    while (below.hasNext()) if (!isText((Expression) below.next())) return false;
    return true;
  }

  // Options with which an XML reader opens a file. Analysis computes schemas with them.

  private void visitXml(UnresolvedFunction call) {
    scala.collection.Iterator arguments = call.arguments().iterator();
    arguments.next();
    while (arguments.hasNext()) {
      Object each = arguments.next();
      boolean plain = each instanceof Literal;
      if (each instanceof UnresolvedFunction) {
        scala.collection.Seq name = ((UnresolvedFunction) each).nameParts();
        String last = ((String) name.last()).toLowerCase(Locale.ROOT);
        plain = last.startsWith("schema_of_") || last.equals("map") && isPlainMap(each);
      }
      if (!plain) refuse("construct", "options of XML that are not written as a map of texts");
    }
  }

  private boolean isPlainMap(Object call) {
    scala.collection.Iterator arguments = ((UnresolvedFunction) call).arguments().iterator();
    while (arguments.hasNext()) {
      Object each = arguments.next();
      if (!(each instanceof Literal)) return false;
      checkOption(String.valueOf(((Literal) each).value()));
    }
    return true;
  }

  private void visitOptions(Expression node) {
    scala.collection.Iterator values = ((scala.Product) node).productIterator();
    while (values.hasNext()) {
      Object value = values.next();
      if (!(value instanceof scala.collection.Map)) continue;
      scala.collection.Iterator keys = ((scala.collection.Map) value).keysIterator();
      while (keys.hasNext()) checkOption(String.valueOf(keys.next()));
    }
  }

  private void checkOption(String name) {
    if (refusedOptions.contains(name.toLowerCase(Locale.ROOT))) refuse("option", name);
  }

  // The answer.

  private void refuse(String kind, String what) {
    if (!refused.isEmpty()) return;
    refusedKind = kind;
    refused = what;
  }

  private String json() {
    return "{\"relations\":[" + relations + "],\"functions\":[" + called + "],\"unknown\":["
        + unknown + "],\"command\":" + quoted(command) + ",\"kind\":" + quoted(refusedKind)
        + ",\"refused\":" + quoted(refused) + "}";
  }

  private static void add(StringBuilder all, String one) {
    if (all.length() > 0) all.append(',');
    all.append(one);
  }

  private static String list(scala.collection.Seq names) {
    StringBuilder made = new StringBuilder();
    scala.collection.Iterator each = names.iterator();
    while (each.hasNext()) add(made, quoted((String) each.next()));
    return "[" + made + "]";
  }

  private static String quoted(String text) {
    StringBuilder made = new StringBuilder("\"");
    for (int i = 0; i < text.length(); i++) {
      char each = text.charAt(i);
      if (each >= ' ' && each < 127 && each != '"' && each != '\\') {
        made.append(each);
      } else {
        made.append(String.format("\\u%04x", new Object[] {Integer.valueOf(each)}));
      }
    }
    return made.append('"').toString();
  }
}
