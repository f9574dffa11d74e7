import java.util.HashSet;
import java.util.IdentityHashMap;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.catalyst.analysis.FunctionRegistry;
import org.apache.spark.sql.catalyst.FunctionIdentifier;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.AttributeReference;
import org.apache.spark.sql.catalyst.expressions.AttributeSet;
import org.apache.spark.sql.catalyst.expressions.AttributeSet$;
import org.apache.spark.sql.catalyst.expressions.ExprId;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.ExpressionInfo;
import org.apache.spark.sql.catalyst.expressions.InheritAnalysisRules;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.Literal$;
import org.apache.spark.sql.catalyst.expressions.NamedExpression;
import org.apache.spark.sql.catalyst.expressions.NamedLambdaVariable;
import org.apache.spark.sql.catalyst.plans.logical.LocalRelation;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.sql.catalyst.trees.TreePattern;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.Metadata;
import org.apache.spark.unsafe.types.CalendarInterval;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Writes a Catalyst tree as JSON. Compiled by Janino, which comes with Spark and supports neither
 * generics nor lambdas.
 *
 * The format is that of `TreeNode.toJSON`: a flat list of nodes, each before its children. toJSON
 * itself does not suffice: it drops the metadata of attributes (which tell which table a column
 * belongs to), `evalMode` (so that try_cast looks like cast), the ids of common expressions,
 * `Expand.projections` if they are not a List, and the types of expressions.
 */
public class PlanDump {
  /** Expressions that are moved from an expression into a plan node of their own, or rewritten
   *  there. */
  private static final scala.Enumeration.Value[] MOVED = new scala.Enumeration.Value[] {
    TreePattern.AGGREGATE_EXPRESSION(),
    TreePattern.GENERATOR(),
    TreePattern.OUTER_REFERENCE(),
    TreePattern.PLAN_EXPRESSION(),
    TreePattern.WINDOW_EXPRESSION(),
  };
  private static final char[] HEX = "0123456789ABCDEF".toCharArray();

  private final StringBuilder out = new StringBuilder();
  private final int charactersMax;

  private PlanDump(int charactersMax) {
    this.charactersMax = charactersMax;
  }

  /** Needed by the reflection of the caller; all methods are static. */
  public PlanDump() {
    this(0);
  }

  // The functions that a session knows.

  /**
   * Returns a line for each function: its name, a tab, and the class of its expression or its
   * builder. This is a single call, since one call through py4j for each of 500 functions would
   * take half a second.
   */
  public static String functionNames(Object session) {
    FunctionRegistry registry = ((SparkSession) session).sessionState().functionRegistry();
    StringBuilder lines = new StringBuilder();
    scala.collection.Iterator names = registry.listFunction().iterator();
    while (names.hasNext()) {
      scala.Option found = registry.lookupFunction((FunctionIdentifier) names.next());
      if (found.isEmpty()) continue;
      ExpressionInfo info = (ExpressionInfo) found.get();
      lines.append(info.getName()).append('\t').append(info.getClassName()).append('\n');
    }
    return lines.toString();
  }

  // A tree.

  /**
   * Returns a plan or an expression as JSON. Throws IllegalStateException if the JSON has more than
   * `charactersMax` characters: a tree may contain the same subtree many times.
   */
  public static String dump(Object node, int charactersMax) {
    PlanDump dump = new PlanDump(charactersMax);
    dump.writeTree((TreeNode) node);
    return dump.out.toString();
  }

  private void writeTree(TreeNode node) {
    out.append('[');
    writeNode(node);
    out.append(']');
  }

  private void writeNode(TreeNode node) {
    if (out.length() > charactersMax) {
      throw new IllegalStateException("a plan of more than " + charactersMax + " characters");
    }
    // A replaceable function has its replacement as its only child. Rules see and change the
    // replacement, while the parameters keep the ids of columns that no longer exist. Only one of
    // the two is written: both would double the text at each level of nested calls.
    boolean replaceable = node instanceof InheritAnalysisRules;
    boolean fresh = replaceable && isFresh((InheritAnalysisRules) node);
    scala.collection.Seq children =
        fresh ? ((InheritAnalysisRules) node).parameters() : node.children();
    out.append("{\"class\":");
    writeText(node.getClass().getName());
    out.append(",\"num-children\":").append(children.length());
    if (node instanceof Literal) {
      writeLiteral((Literal) node);
    } else {
      writeFields(node, children, replaceable, fresh);
    }
    if (node instanceof Expression) writeTraits((Expression) node);
    if (node instanceof LocalRelation) writeRows((LocalRelation) node);
    out.append('}');
    scala.collection.Iterator below = children.iterator();
    while (below.hasNext()) {
      out.append(',');
      writeNode((TreeNode) below.next());
    }
  }

  private void writeFields(
      TreeNode node, scala.collection.Seq children, boolean replaceable, boolean fresh) {
    Map places = new IdentityHashMap();
    scala.collection.Iterator below = children.iterator();
    for (int i = 0; below.hasNext(); i++) places.put(below.next(), Integer.valueOf(i));
    scala.Product product = (scala.Product) node;
    scala.collection.Iterator names = product.productElementNames();
    scala.collection.Iterator values = product.productIterator();
    StringBuilder settings = new StringBuilder();
    while (values.hasNext()) {
      String name = (String) names.next();
      Object value = values.next();
      if (node instanceof Expression && !holdsTree(value) && !isEmpty(value)) {
        settings.append(settings.length() == 0 ? "\"" : ",\"").append(name).append('"');
      }
      boolean hidden = fresh && name.equals("replacement")
          || replaceable && !fresh && holdsTree(value) && !places.containsKey(value);
      writeName(name);
      if (hidden) out.append("null"); else writeValue(value, places);
    }
    // A number may be a setting or the index of a child; these are the settings.
    if (settings.length() > 0 && !(node instanceof AttributeReference)) {
      writeName("settings");
      out.append('[').append(settings).append(']');
    }
    if (replaceable) {
      writeName("stale");
      out.append(!fresh);
    }
  }

  private static boolean isEmpty(Object value) {
    return value == null
        || value instanceof scala.Option && ((scala.Option) value).isEmpty()
        || value instanceof scala.collection.Iterable
            && ((scala.collection.Iterable) value).isEmpty();
  }

  private static boolean holdsTree(Object value) {
    if (value instanceof scala.Option) {
      return !((scala.Option) value).isEmpty() && holdsTree(((scala.Option) value).get());
    }
    if (value instanceof scala.collection.Seq) {
      scala.collection.Seq all = (scala.collection.Seq) value;
      return !all.isEmpty() && holdsTree(all.head());
    }
    if (value instanceof scala.Tuple2) return holdsTree(((scala.Tuple2) value)._1());
    return value instanceof TreeNode;
  }

  /**
   * Returns whether the parameters of a replaceable function still match its replacement: they read
   * the same columns, and nothing has been moved out of the replacement.
   */
  private static boolean isFresh(InheritAnalysisRules node) {
    Expression made = ((org.apache.spark.sql.catalyst.expressions.RuntimeReplaceable) node)
        .replacement();
    Set variables = new HashSet();
    Set own = new HashSet();
    collectVariables(made, variables);
    AttributeSet read = AttributeSet$.MODULE$.empty();
    scala.collection.Iterator parameters = node.parameters().iterator();
    while (parameters.hasNext()) {
      Expression parameter = (Expression) parameters.next();
      if (!parameter.resolved()) return false;
      // Rules rewrite the plan of a subquery only where they see it: in the replacement.
      if (parameter.containsPattern(TreePattern.PLAN_EXPRESSION())) return false;
      for (int i = 0; i < MOVED.length; i++) {
        if (parameter.containsPattern(MOVED[i]) && !made.containsPattern(MOVED[i])) return false;
      }
      read = read.$plus$plus(parameter.references());
      collectVariables(parameter, own);
    }
    AttributeSet reads = made.references();
    return read.subsetOf(reads) && reads.subsetOf(read) && variables.containsAll(own);
  }

  private static void collectVariables(Expression node, Set into) {
    if (!node.containsPattern(TreePattern.LAMBDA_VARIABLE())) return;
    if (node instanceof NamedLambdaVariable) {
      into.add(Long.valueOf(((NamedLambdaVariable) node).exprId().id()));
    }
    scala.collection.Iterator below = node.children().iterator();
    while (below.hasNext()) collectVariables((Expression) below.next(), into);
  }

  /** Writes what no constructor argument contains: an expression's id, type, nullability and
   *  determinism. */
  private void writeTraits(Expression node) {
    if (!node.resolved()) return;
    if (node instanceof NamedExpression && !(node instanceof NamedLambdaVariable)) {
      writeName("exprId");
      out.append(((NamedExpression) node).exprId().id());
    }
    if (!(node instanceof Literal) && !(node instanceof AttributeReference)) {
      try {
        String type = typeJson(node.dataType());
        boolean nullable = node.nullable();
        writeName("type");
        out.append(type);
        writeName("null");
        out.append(nullable);
      } catch (Exception none) {
        // Some expressions have no type of their own (the list of a subquery, the frame of a sort
        // order).
      }
    }
    if (!node.deterministic()) {
      writeName("volatile");
      out.append("true");
    }
  }

  /** Returns the rows of a VALUES as lists of literals. */
  private void writeRows(LocalRelation node) {
    writeName("rows");
    out.append('[');
    scala.collection.Iterator rows = node.data().iterator();
    for (boolean first = true; rows.hasNext(); first = false) {
      InternalRow row = (InternalRow) rows.next();
      out.append(first ? "[" : ",[");
      for (int i = 0; i < node.output().length(); i++) {
        DataType type = ((Attribute) node.output().apply(i)).dataType();
        if (i > 0) out.append(',');
        writeTree(Literal$.MODULE$.create(row.get(i, type), type));
      }
      out.append(']');
    }
    out.append(']');
  }

  // Values.

  /**
   * Writes the value of a literal as Spark stores it, so that it depends on no time zone or format:
   * a date as days, a timestamp as microseconds, bytes as hexadecimal digits.
   */
  private void writeLiteral(Literal node) {
    Object value = node.value();
    writeName("value");
    if (value == null) {
      out.append("null");
    } else if (value instanceof byte[]) {
      writeText(hex((byte[]) value));
    } else if (value instanceof Decimal) {
      writeText(((Decimal) value).toJavaBigDecimal().toPlainString());
    } else if (value instanceof CalendarInterval) {
      CalendarInterval it = (CalendarInterval) value;
      writeText(it.months + " " + it.days + " " + it.microseconds);
    } else {
      writeText(value.toString());
    }
    if (value instanceof UTF8String) {
      UTF8String text = (UTF8String) value;
      // A Java string would lose bytes that are not UTF-8.
      if (!text.equals(UTF8String.fromString(text.toString()))) {
        writeName("bytes");
        writeText(hex(text.getBytes()));
      }
    }
    writeName("dataType");
    out.append(typeJson(node.dataType()));
    writeName("sql");
    try {
      writeText(node.sql());
    } catch (Exception none) {
      out.append("null");
    }
  }

  private void writeValue(Object value, Map places) {
    if (value == null) {
      out.append("null");
    } else if (value instanceof TreeNode) {
      Object place = places.get(value);
      if (place != null) out.append(place.toString()); else writeTree((TreeNode) value);
    } else if (value instanceof Boolean || value instanceof Integer || value instanceof Long
        || value instanceof Short || value instanceof Byte) {
      out.append(value.toString());
    } else if (value instanceof String || value instanceof Number || value instanceof Character
        || value instanceof UTF8String) {
      writeText(value.toString());
    } else if (value instanceof ExprId) {
      out.append(((ExprId) value).id());
    } else if (value instanceof DataType) {
      out.append(typeJson((DataType) value));
    } else if (value instanceof Metadata) {
      out.append(((Metadata) value).json());
    } else if (value instanceof scala.Option) {
      scala.Option option = (scala.Option) value;
      if (option.isEmpty()) out.append("null"); else writeValue(option.get(), places);
    } else if (value instanceof scala.collection.Seq) {
      writeAll((scala.collection.Seq) value, places);
    } else if (value instanceof scala.collection.Map) {
      // The options of a function, as pairs.
      writeAll(((scala.collection.Map) value).toSeq(), places);
    } else {
      writeProduct(value, places);
    }
  }

  private void writeAll(scala.collection.Seq values, Map places) {
    out.append('[');
    scala.collection.Iterator all = values.iterator();
    for (boolean first = true; all.hasNext(); first = false) {
      if (!first) out.append(',');
      writeValue(all.next(), places);
    }
    out.append(']');
  }

  /** Writes an object as its name, and a case class of Catalyst as its fields. Anything else is
   *  written as null: catalogs, encoders and functions say nothing about a query. */
  private void writeProduct(Object value, Map places) {
    String name = value.getClass().getName();
    boolean told = name.startsWith("org.apache.spark.sql.catalyst.plans")
        || name.startsWith("org.apache.spark.sql.catalyst.expressions")
        || name.startsWith("org.apache.spark.sql.catalyst.AliasIdentifier")
        || name.startsWith("org.apache.spark.sql.types.StructField")
        || name.startsWith("scala.Tuple");
    if (name.endsWith("$")) {
      out.append("{\"object\":");
      writeText(name);
      out.append('}');
    } else if (value instanceof scala.Product && told) {
      scala.Product product = (scala.Product) value;
      scala.collection.Iterator names = product.productElementNames();
      scala.collection.Iterator values = product.productIterator();
      out.append("{\"product-class\":");
      writeText(name);
      while (values.hasNext()) {
        writeName((String) names.next());
        writeValue(values.next(), places);
      }
      out.append('}');
    } else if (name.startsWith("scala.Enumeration")) {
      writeText(value.toString());
    } else {
      out.append("null");
    }
  }

  /** Returns a type as Spark's JSON. If that JSON loses a collation (it keeps one only in the
   *  metadata of an enclosing field), the type's SQL text is added. */
  private static String typeJson(DataType type) {
    String sql = type.sql();
    if (!sql.contains("COLLATE")) return type.json();
    StringBuilder made = new StringBuilder("{\"type\":\"collated\",\"sql\":");
    appendText(made, sql);
    return made.append('}').toString();
  }

  private void writeName(String name) {
    out.append(',');
    writeText(name);
    out.append(':');
  }

  private void writeText(String text) {
    appendText(out, text);
  }

  private static void appendText(StringBuilder into, String text) {
    into.append('"');
    for (int i = 0; i < text.length(); i++) {
      char c = text.charAt(i);
      if (c == '"' || c == '\\') {
        into.append('\\').append(c);
      } else if (c < 32 || Character.isSurrogate(c)) {
        into.append("\\u");
        for (int shift = 12; shift >= 0; shift -= 4) into.append(HEX[c >> shift & 15]);
      } else {
        into.append(c);
      }
    }
    into.append('"');
  }

  private static String hex(byte[] bytes) {
    StringBuilder made = new StringBuilder();
    for (int i = 0; i < bytes.length; i++) {
      made.append(HEX[bytes[i] >> 4 & 15]).append(HEX[bytes[i] & 15]);
    }
    return made.toString();
  }
}
